"""How commands are given passwords: expressions alone, each with its `value`.

Repetitions have bounds wherever an expression can begin anew, as in redact.py.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re

NAME = r"[A-Za-z_][\w.-]{0,200}"
ITEMS = r"""\\{0,8}["'],(?=\\{0,8}["'])"""
"""The border of two items of a list, as machines write it."""
_NEXT = rf"""(?:\\{{0,8}}["']?,?\s{{1,40}}|{ITEMS}|=)?"""
"""Between a short option and its value: nothing, a space, or the border of two list items."""
_WORD = r"""(?:\\{1,8}["'][^"'\\\n]*\\{1,8}["']|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s"'`\\,;)\]}]+)"""
_GAP = r"""(?:[ \t]{1,20}|\\{0,8}["'],\s{0,40}\\{0,8}["'])"""
"""Between two words of a command, also as two items of a list."""
CONFIGURE = re.compile(
    rf"\b(?:aws(?:{_GAP}[^\s\"',]{{1,60}}){{0,3}}?{_GAP}configure|dvc{_GAP}remote|"
    rf"(?:rclone|git|gcloud|npm|yarn|pip|poetry|conda){_GAP}config){_GAP}"
    r"(?:-|//|set\b|create\b|update\b|password\b|modify\b|\w{1,40}\.)(?:[^\n]|(?<=,)\n){0,1000}"
)
"""Programs whose settings are pairs of words; a list of words may have one a line."""
PAIR = re.compile(
    rf"""(?<![\w.$-])(?P<name>{NAME})(?P<link>[ \t]{{1,20}}|\\{{0,8}}["'],\s{{0,40}})"""
    r"""(?=[^\s-])"""
)
LOGIN = re.compile(
    rf"\bwandb{_GAP}login(?:{_GAP}--?(?:host(?:=|{_GAP})[^\s\"',]{{1,200}}|[\w-]{{1,40}})){{0,4}}"
    rf"{_GAP}(?P<value>(?!-)[^\s\"'\\`,;|&.()]{{1,200}}|\"[^\"\n]{{1,200}}\"|'[^'\n]{{1,200}}')"
    r"(?=[ \t]*(?:[\n;|&#)\"'\\]|\Z)|[ \t]+--?\w)"
)
"""The last word of the command, or the last before options."""
AFTER_LOGIN = frozenset(
    {
        "failed",
        "failure",
        "first",
        "again",
        "required",
        "needed",
        "succeeded",
        "successful",
        "error",
    }
)
_TICKETS = r"(?:kinit|klog|iinit|myproxy-logon|(?:voms|grid)-proxy-init)\b"
"""Programs that read a password and nothing else."""
_SUDO = r"\bsudo(?:[ \t]{1,20}[\w./@-]{1,60}){0,4}?[ \t]{1,20}-\w{0,5}S"
_FROM_STDIN = (
    rf"(?:--(?:password-stdin|with-token|passphrase-fd)|{_SUDO}|"
    r"-pass(?:in|out)?[ \t]{1,20}(?:stdin|fd:0)\b|"
    r"\b(?:docker|podman|helm|wandb|huggingface-cli|hf|apptainer|singularity)\b"
    rf"[^|\n;]{{1,100}}?\blogin\b|\brclone[ \t]{{1,20}}obscure\b|\b{_TICKETS})"
)
"""Commands that read a password from what they are given."""
PIPED = re.compile(
    r"\b(?:echo|printf)[ \t]{1,20}"
    r"(?:(?:-[neE]{1,3}|\\?[\"']%s(?:\\{1,4}n)?\\?[\"'])[ \t]{1,20})?"
    r"""(?P<value>(?:[^|\n;&"']|"[^"\n]{0,300}"|'[^'\n]{0,300}'){1,300}?)[ \t]{0,20}\|"""
    rf"(?:[^|\n;]{{1,200}}?(?:--password-stdin|--with-token|--passphrase-fd|{_SUDO}|"
    r"\brclone[ \t]{1,20}obscure\b|-pass(?:in|out)?[ \t]{1,20}(?:stdin|fd:0)\b)|"
    r"[ \t]{0,20}(?:docker|podman|helm|wandb|huggingface-cli|hf|apptainer|singularity)\b"
    r"[^|\n;]{1,100}?\blogin\b|"
    rf"[ \t]{{0,20}}(?:[\w.-]{{0,40}}/){{0,8}}{_TICKETS})"
)
"""echo password | docker login --password-stdin, or | kinit"""
HERE = re.compile(rf"{_FROM_STDIN}[^\n;|&<]{{0,200}}<<<[ \t]{{0,20}}(?P<value>{_WORD})")
_BREAK = r"(?:\n|\\{1,4}n)"
"""The end of a line, also in a text that a machine has quoted."""
_HERE_LINE = r"(?!(?:[ \t]|\\{1,4}t){0,20}(?P=end)\b)(?:(?!\\{1,4}n)[^\n])*"
HERE_TEXT = re.compile(
    rf"(?P<reads>{_FROM_STDIN}[^\n;|&<]{{0,200}})?"
    r"<<-?[ \t]{0,5}\\{0,8}[\"']?(?P<end>\w{1,40})"
    rf"(?(reads)|[\"'\\ \t]{{0,20}}\|(?:(?!\\{{1,4}}n)[^\n]){{0,200}}?{_FROM_STDIN})"
    rf"(?:(?!\\{{1,4}}n)[^\n]){{0,200}}{_BREAK}"
    rf"(?P<value>{_HERE_LINE}(?:{_BREAK}{_HERE_LINE}){{0,40}})"
)
"""kinit me <<EOF, or cat <<EOF | kinit me, and the lines up to EOF."""
_TRACE = r"(?m)^\+{1,9}[ ]"
_ECHOED = r"(?:echo|printf)[ \t](?P<value>[^\n]{1,300})"
TRACED = re.compile(
    rf"{_TRACE}{_ECHOED}(?=\n(?:\+[^\n]{{0,300}}\n)?\+{{1,9}}[ ][^\n]{{0,200}}?{_FROM_STDIN})"
)
TRACED_AFTER = re.compile(
    rf"{_TRACE}(?=[a-z/])[^\n]{{0,200}}?{_FROM_STDIN}[^\n]{{0,300}}\n\+{{1,9}}[ ]{_ECHOED}"
)
"""The two halves of a pipe as `set -x` shows them, in either order."""
PLACED = re.compile(
    rf"(?:\brclone{_GAP}obscure|"
    rf"\bmc{_GAP}(?:alias{_GAP}set|config{_GAP}host{_GAP}add)(?:{_GAP}--?[\w-]{{1,30}}){{0,4}}"
    rf"(?:{_GAP}[\"']?[^\s\"',]{{1,200}}[\"']?){{3}}|"
    r"\bsmbclient\b[^;|&\n]{0,100}?[\s\"'](?://|\\{2,8})[^\s\"',;|&]{1,200}[\"']?|"
    rf"\bb2{_GAP}(?:authorize[-_]account|account{_GAP}authorize)(?:{_GAP}--?[\w-]{{1,30}}){{0,4}}"
    rf"{_GAP}[\"']?[^\s\"',]{{1,100}}[\"']?){_GAP}(?P<value>(?!-){_WORD})"
)
"""Programs that take a password as a word in its place."""
VAULT = re.compile(
    rf"\bvault{_GAP}login(?:{_GAP}-[^\s\"',]{{1,100}}){{0,6}}{_GAP}"
    rf"(?P<value>(?!-|\w{{1,40}}=){_WORD})(?=[ \t]*(?:[\n;|&#)\"'\\]|\Z)|[ \t]+--?\w)"
)
ORACLE = re.compile(
    rf"(?:\bjdbc:oracle:\w{{1,20}}:|\b(?:sqlplus|sqlldr|expdp|impdp|rman)(?:{_GAP}-\w{{1,20}}){{0,5}}"
    rf"{_GAP}(?:userid=)?\\?[\"']?)(?P<value>(?!/)[\w.$#-]{{1,100}}/(?:[^\s\"'\\]{{1,200}}(?=@)|"
    r"[^\s\"'\\@]{1,200}))"
)
"""sqlplus user/password@database"""
PASSWORD_OPTION = re.compile(
    r"\b(?:(?:sshpass|mysql[\w-]{0,20}|mariadb[\w-]{0,20}|mongo\w{0,20}|7z\w{0,3}|twine)\b"
    r"[^;|&]{0,200}?[\s\"']-p|"
    r"(?:docker|podman|nerdctl|helm|skopeo|oras|crane|apptainer|singularity)\b"
    r"[^;|&]{0,100}?\blogin\b[^;|&]{0,200}?[\s\"']-p|"
    r"az\b[^;|&]{0,100}?\blogin\b[^;|&]{0,200}?[\s\"']-p|"
    r"redis-cli\b[^;|&]{0,200}?[\s\"']-a|ldap\w{1,20}\b[^;|&]{0,200}?[\s\"']-w|"
    r"ssh-keygen\b[^;|&]{0,200}?[\s\"']-[NP]|openssl\b[^;|&]{0,200}?[\s\"']-[kK](?![\w-])|"
    rf"(?:sqlcmd|zip|unzip)\b[^;|&]{{0,200}}?[\s\"']-P){_NEXT}(?P<value>{_WORD})"
)
"""Programs that take a password by one letter."""
USER_OPTION = re.compile(
    rf"(?<![\w-])(?:-[uU]|--(?:proxy-)?user){_NEXT}"
    r"""(?P<value>"[^":%\n]*[:%][^"\n]+"|'[^':%\n]*[:%][^'\n]+'|"""
    r"""\\?["']?[^\s"'\\,;:%]+[:%][^\s"'\\,;)\]}]+)"""
)
"""-u user:password, of curl and others; -U user%password of smbclient."""
LFTP = re.compile(
    rf"\blftp\b[^|&]{{0,200}}?[\s\"'](?:-u|--user){_NEXT}"
    r"""(?P<value>"[^",\n]{1,100},[^"\n]{1,200}"|'[^',\n]{1,100},[^'\n]{1,200}'|"""
    r"""[^\s"'\\,;]{1,100},[^\s"'\\;)\]}]{1,200})"""
)

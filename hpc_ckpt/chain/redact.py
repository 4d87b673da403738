"""Takes secrets out of texts that are given away. Pure: text in, text and list of places out.

What is named like a secret goes, what has the form of a known token goes, and so does what only
looks random. Rather too much than too little: a number that is missing can be asked for.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MARK = "[redacted]"

_ALWAYS = frozenset({
    "password", "passwords", "passwd", "passphrase", "pass", "pwd", "pw", "secret", "secrets",
    "credential", "credentials", "apikey", "accesskey", "secretkey", "privatekey", "authtoken",
    "accesstoken", "bearer", "cookie", "cookies", "netrc", "htpasswd", "passcode", "passkey",
    "passin", "passout", "pswd", "psw", "creds", "jwt", "salt", "otp",
})  # fmt: skip
"""Parts of a name that make a secret of any value."""
_ENDINGS = ("password", "passwd", "passphrase", "passcode", "pass", "secret")
"""The same where they are the end of a part: PGPASSWORD, MYPASS, clientsecret."""
_PASSING = frozenset(
    {"bypass", "compass", "lowpass", "highpass", "bandpass", "allpass", "encompass"}
)
"""Words with such an end that are none."""
_MOSTLY = frozenset({
    "token", "tokens", "key", "keys", "auth", "authorization", "signature", "sig",
})  # fmt: skip
"""The same, but `max_tokens=4096` and `key: 3` are counts."""
_LONG_NUMBER = 6
"""Digits of a number that is no count any more where one thing is named: `token: 1234567890`."""
_HARMLESS = frozenset({"pwd", "oldpwd", "pass", "keyerror"})
"""Whole names that are not: the working directory, `3 tests pass`, a traceback's last line."""
_NOTHING = re.compile(
    r"(?i)(?:\(?null\)?|none|true|false|yes|no|auth/\w+|cred/\w+|n/a|\*+|\[redacted\]|<[\w -]*>|"
    r"\$\{?\w+\}?|\$\([^)]*\)|[|>][-+]?\d?)"
)
"""Values that tell nothing: empty ones, names of other variables, the beginning of a block."""

_NAME = r"[A-Za-z_][\w.-]{0,80}"
_VALUE = (
    r"""(?:"(?:[^"\\\n]|\\.)*"|\\"(?:[^"\\\n]|\\[^"\n])*\\"|'[^'\n]*'|\[[^\]]{0,4000}\]|"""
    r"""[^\s"'`\\]*[^\s"'`\\,;)\]}])"""
)
"""In quotes, in quotes that stand in a quoted text, a list, or a bare word."""
_ASSIGNED = re.compile(
    rf"""(?<![\w.$-])-{{0,2}}(?P<name>{_NAME})(?P<link>\\?["']?\s{{0,3}}[=:]\s{{0,3}}(?:\\\n\s*)?)"""
    rf"""(?P<value>{_VALUE})"""
)
"""NAME=value, NAME: value, "NAME": "value", --name=value."""
_FLAGGED = re.compile(
    rf"""(?<![\w-])--?(?P<name>{_NAME})(?P<link>\\?["']?,?\s{{1,40}})(?P<value>{_VALUE})"""
)
"""--name value, also as two items of a list."""
_SETENV = re.compile(rf"\bsetenv\s+(?P<name>{_NAME})(?P<link>\s+)(?P<value>{_VALUE})")
_HEADER = re.compile(
    r"(?im)(?P<name>\b(?:proxy-)?authorization|\bx-[\w-]*(?:key|token|secret)|\b(?:set-)?cookie)"
    r"(?P<link>\\?[\"']?\s*:\s*\\?[\"']?)(?P<value>[^\r\n\"'\\]+)"
)
_BEARER = re.compile(r"(?i)\b(?:bearer|basic)\s+(?P<value>[\w.~+/=-]{8,})")
_BLOCK = re.compile(
    rf"""(?m)^(?P<indent>[ ]*)(?:-[ ]+)?["']?(?P<name>{_NAME})["']?(?P<link>[ ]*:[ ]*[|>][-+\d]*"""
    r"""[ ]*(?:\#.*)?\n(?:[ ]*\n)*(?P=indent)[ ]+)"""
    r"""(?P<value>\S.*(?:\n(?:(?P=indent)[ ]+.*|[ ]*(?=\n)))*)"""
)
"""A text of several lines in YAML, under its name."""
_LIST = re.compile(
    rf"""(?m)^(?P<indent>[ ]*)["']?(?P<name>{_NAME})["']?(?P<link>[ ]*:[ ]*\n(?P=indent)[ ]*)"""
    r"""(?P<value>-[ ].*(?:\n(?P=indent)[ ]*-[ ].*)*)"""
)
"""A list in YAML, one item a line."""
_NEXT = r"""(?:\\?["']?,?\s{1,40}|=)?"""
"""Between a short option and its value: nothing, a space, or the border of two list items."""
_WORD = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s"'`\\,;)\]}]+)"""
_PASSWORD_OPTION = re.compile(
    r"\b(?:(?:sshpass|mysql[\w-]*|mariadb[\w-]*|mongo\w*)\b[^;|&]{0,200}?[\s\"']-p|"
    r"redis-cli\b[^;|&]{0,200}?[\s\"']-a|ldap\w+\b[^;|&]{0,200}?[\s\"']-w|"
    rf"(?:sqlcmd|zip|unzip)\b[^;|&]{{0,200}}?[\s\"']-P){_NEXT}(?P<value>{_WORD})"
)
"""Programs that take a password by one letter."""
_USER_OPTION = re.compile(
    rf"(?<![\w-])(?:-[uU]|--(?:proxy-)?user){_NEXT}"
    r"""(?P<value>"[^":\n]*:[^"\n]+"|'[^':\n]*:[^'\n]+'|\\?["']?[^\s"'\\,;:]+:[^\s"'\\,;)\]}]+)"""
)
"""-u user:password, of curl and others."""
_NETRC = re.compile(r"\b(?:login|user|account)\s+\S+\s+password\s+(?P<value>[^\s\"'\\]+)")
_SAID = re.compile(
    r"(?P<name>(?i:\b\w*(?:password|passwd|passphrase|passcode|secret|token|api[ _-]?key))|"
    r"\b[A-Z]\w*_KEY)(?:\s+(?:is|was))?\s+(?P<value>(?=[^\s\d]*\d)(?=[^\sA-Za-z]*[A-Za-z])"
    r"[^\s\"'`,;:/()]{6,})"
)
"""In a sentence: only what has letters and digits, since words follow there too."""
_HOOK = re.compile(
    r"(?i)\bhttps?://(?:hooks\.slack\.com/(?:services|workflows|triggers)/|"
    r"(?:\w+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/|[\w.-]+\.webhook\.office\.com/|"
    r"api\.telegram\.org/bot|maker\.ifttt\.com/trigger/[^\s/]+/(?:json/)?with/key/)"
    r"(?P<value>[^\s\"'`\\<>),;]+)"
)
"""Addresses that whoever knows them may write to."""
_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,20}://(?P<value>[^\s/\"'<>]+)(?=@)", re.IGNORECASE)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?P<value>.*?)"
    r"(?=-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_FORM = re.compile(
    r"(?<![\w-])(?P<value>sk-[\w-]{16,}|(?:gh[opsur]|github_pat|glpat|gldt|hf|npm|pypi|dop_v1|"
    r"wandb_v1)[_-][\w-]{16,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|"
    r"ya29\.[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|SG\.[\w-]{16,}\.[\w-]{16,}|"
    r"AGE-SECRET-KEY-\w+|\d{8,10}:[A-Za-z0-9_-]{30,})"
)
"""Tokens whose makers gave them a form: GitHub, Hugging Face, Amazon, Google, Telegram, …"""
_LONG = re.compile(r"(?<![\w+/=-])(?P<value>[\w+/=-]{24,})(?![\w+/=-])", re.ASCII)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_BEFORE_COMMIT = re.compile(r"\"git\": ?\"$|\b(?:commit|oid|revision)[ :=]\s*\"?$")
"""What stands before the version of the code, which is no secret and often asked for."""
_LONG_HEX = 32
_LONG_PIECE = 12
_RANDOM_CHANGES = 0.3

Judge = Callable[["re.Match[str]"], "str | None"]
"""What the place is called in the list; None: it may stay."""


@dataclass(frozen=True)
class Place:
    """Where something was taken out; never what."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def redact(text: str, file: str) -> tuple[str, list[Place]]:
    """`text` without secrets, and the places; `file` is what they are called."""
    places: list[Place] = []
    for pattern, judge in _PASSES:
        text = _replace(text, file, pattern, judge, places)
    return text, sorted(dict.fromkeys(places), key=lambda place: (place.line, place.what))


def _replace(
    text: str, file: str, pattern: re.Pattern[str], judge: Judge, places: list[Place]
) -> str:
    parts: list[str] = []
    end = counted = 0
    line = 1
    for match, what in _judged(text, pattern, judge):
        begin, after = match.span("value")
        line += text.count("\n", counted, begin)
        counted = begin
        places.append(Place(file, line, what))
        # A private key of ten lines stays ten lines, so that the line numbers go on being true.
        breaks = "\n" * match["value"].count("\n")
        parts += [text[end:begin], _instead(match), breaks]
        end = after
    return "".join([*parts, text[end:]])


def _judged(
    text: str, pattern: re.Pattern[str], judge: Judge
) -> Iterator[tuple[re.Match[str], str]]:
    """What is to go. In a value that may stay the search goes on: a command line is one."""
    place = 0
    while (match := pattern.search(text, place)) is not None:
        what = judge(match)
        if what is not None:
            yield match, what
        inside = match.start("value")
        place = match.end() if what is not None or inside <= match.start() else inside


def _instead(match: re.Match[str]) -> str:
    """In the same quotes, and in some where JSON needs them."""
    value = match["value"]
    quotes = re.fullmatch(r"(\\?[\"']).*?(\\?[\"'])", value, re.DOTALL)
    if quotes:
        return f"{quotes[1]}{MARK}{quotes[2]}"
    key = re.match(r"(\\?\")\s*:", match.groupdict().get("link") or "")
    return f"{key[1]}{MARK}{key[1]}" if key and match.re is _ASSIGNED else MARK


# ── judging ───────────────────────────────────────────────────────────────────────────────
def _by_name(match: re.Match[str]) -> str | None:
    name, value = match["name"].strip("-"), match["value"].strip("\\\"'")
    if not value or _NOTHING.fullmatch(value):
        return None
    kind = secrecy(name)
    if kind is None or (kind == "mostly" and _is_count(value, several=name.lower().endswith("s"))):
        return None
    return f"value of {name}"


def secrecy(name: str) -> str | None:
    """'always' or 'mostly' for a name like a secret's, else None."""
    if name.lower() in _HARMLESS:
        return None
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    words = {part.lower() for part in parts} | {name.lower()}
    if words & _ALWAYS or any(word.endswith(_ENDINGS) for word in words - _PASSING):
        return "always"
    return "mostly" if words & _MOSTLY else None


def _is_count(value: str, *, several: bool) -> bool:
    if not several and value.isdecimal() and len(value) >= _LONG_NUMBER:
        return False
    return re.fullmatch(r"[-+]?[\d._]+(?:e[-+]?\d+)?", value, re.IGNORECASE) is not None


def _known(what: str) -> Judge:
    def judge(match: re.Match[str]) -> str | None:
        value = match["value"]
        return None if MARK in value or _NOTHING.fullmatch(value.strip("\\\"'")) else what

    return judge


def _user(match: re.Match[str]) -> str | None:
    """Numbers are a user's and a group's; an address is no user."""
    value = match["value"].strip("\\\"'")
    if re.fullmatch(r"\d+:\d+", value) or "://" in value or MARK in value:
        return None
    return "user and password of a command"


def _said(match: re.Match[str]) -> str | None:
    return None if _NOTHING.fullmatch(match["value"]) else f"what follows {match['name']}"


def _header(match: re.Match[str]) -> str | None:
    return None if match["value"].strip() == MARK else f"value of {match['name']}"


def _random(match: re.Match[str]) -> str | None:
    value, start = match["value"], match.start()
    before = match.string[max(0, start - 40) : start]
    if _UUID.fullmatch(value.strip("=")) or _BEFORE_COMMIT.search(before):
        return None
    longest = max(re.findall(r"[A-Za-z0-9]+", value), key=len, default="")
    if len(longest) >= _LONG_HEX and re.fullmatch(r"[0-9a-f]+|[0-9A-F]+", longest):
        return None if longest.isdecimal() else "a long hexadecimal word"
    return "a long random word" if len(longest) >= _LONG_PIECE and _mixed(value) else None


def _mixed(value: str) -> bool:
    """Whether letters and digits change places as often as they do at random.

    In names and paths kinds of characters come in rows; across a separator nothing is counted.
    """
    kinds = [_kind(character) for character in value]
    pairs = [(a, b) for a, b in itertools.pairwise(kinds) if a and b]
    changes = sum(a != b for a, b in pairs)
    return "d" in kinds and len(pairs) >= 16 and changes >= _RANDOM_CHANGES * len(pairs)


def _kind(character: str) -> str:
    if character.isdigit():
        return "d"
    if not character.isalpha():
        return ""
    return "u" if character.isupper() else "l"


_PASSES: tuple[tuple[re.Pattern[str], Judge], ...] = (
    (_PRIVATE_KEY, _known("a private key")),
    (_BLOCK, _by_name),
    (_LIST, _by_name),
    (_HOOK, _known("an address to write to")),
    (_URL, _known("user and password of an address")),
    (_HEADER, _header),
    (_BEARER, _known("credentials of a request")),
    (_PASSWORD_OPTION, _known("a password of a command")),
    (_USER_OPTION, _user),
    (_NETRC, _known("a password")),
    (_SETENV, _by_name),
    (_ASSIGNED, _by_name),
    (_FLAGGED, _by_name),
    (_SAID, _said),
    (_FORM, _known("a token")),
    (_LONG, _random),
)

"""Takes secrets out of texts that are given away. Pure: text in, text and list of places out.

What is named like a secret goes, what has the form of a known token goes, and so does what only
looks random. Rather too much than too little: a number that is missing can be asked for.

Every pass reads each character a bounded number of times: what follows a name is looked at only
if the name is a secret's, and repetitions of an expression have bounds wherever it can begin anew.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .passwords import (
    AFTER_LOGIN,
    CONFIGURE,
    HERE,
    HERE_TEXT,
    ITEMS,
    LFTP,
    LOGIN,
    NAME,
    ORACLE,
    PAIR,
    PASSWORD_OPTION,
    PIPED,
    PLACED,
    TRACED,
    TRACED_AFTER,
    USER_OPTION,
    VAULT,
)
from .secrecy import is_secret, looks_random, secrecy, tells_nothing

MARK = "[redacted]"

_STRING = (
    r"""\$?"(?:[^"\\\n]|\\.)*"|\$'(?:[^'\\\n]|\\.)*'|'[^'\n]*'|"""
    r"""\$?"(?:[^"\\]|\\.){1,1000}"(?=[\s;,&|)\]}]|\Z)|'[^'"]{1,1000}'(?=[\s;,&|)\]}]|\Z)|"""
    r"""\$?"[^"\n]*(?=\n|\Z)|'[^'"\n]*(?=["\n]|\Z)"""
)
"""In quotes, those of bash too, of several lines where the last quote is the end of a word; to the
end of the line where the text was cut."""
_LONG_STRING = r"""\"{3}[\s\S]{0,4000}?\"{3}|'{3}[\s\S]{0,4000}?'{3}"""
_PIECES = (
    r"""(?:\$?"(?=[\w$])(?:[^"\\\n]|\\.)*"|\$'(?:[^'\\\n]|\\.)*'|'(?=[\w$])[^'\n]*'|"""
    r"""[\w.@%+/~=-]+)*"""
)
"""What a shell takes for parts of the same word."""
_SHELL = r"""\\[ !$&()*;<>?\[\]^{|}~#@%-]"""
_BARE = rf"""(?:[^\s\0"'`\\]|{_SHELL})*(?:[^\s\0"'`\\,;)\]}}]|{_SHELL})"""
_IN_BRACKETS = r"""[^()"']|"(?:[^"\\\n]|\\.){0,200}"|'[^'\n]{0,200}'"""
_BRACKETS = (
    rf"""\((?:{_IN_BRACKETS}|\((?:{_IN_BRACKETS}|\((?:{_IN_BRACKETS}){{0,200}}\)){{0,200}}\))"""
    r"""{0,1000}\)"""
)
"""Brackets in brackets, three deep. Each sign can be read in one way only, and each bracket that is
not closed ends the search of those before it."""
_VALUE = re.compile(
    rf"""(?:(?i:bearer|basic|token|digest|apikey)[ ]{{1,3}}(?=[\w"']))?"""
    rf"""(?:(?P<escape>\\+)(?P<mark>["'])(?:(?!(?P=escape)(?P=mark)).)*(?P=escape)(?P=mark)|"""
    rf"""(?:{_LONG_STRING}|{_STRING}){_PIECES}|"""
    rf"""(?:\$|[A-Za-z_][\w.]{{0,100}})?{_BRACKETS}(?:{_BARE})?{_PIECES}|`[^`\n]*`|\[[^\]]{{0,4000}}\]|\{{[^{{}}]{{0,4000}}\}}|{_BARE}{_PIECES})"""
)
"""In quotes, in quotes that stand in a quoted text, in brackets, a call, a list, a mapping, or a
bare word; words of a shell can have several such pieces."""
_SPACE = r"(?:\s{0,3}(?=\S)|[ \t]{0,20})"
_ASSIGNED = re.compile(
    rf"""(?<![\w.$-])-{{0,2}}(?P<name>{NAME})"""
    rf"""(?P<link>\\{{0,8}}["']?\]?{_SPACE}(?:=>|->|[:+?!]=|={{1,3}}|::?=?){_SPACE}(?:\\\n\s{{0,40}})?)"""
)
"""NAME=value, NAME: value, "NAME": "value", --name=value, x["NAME"] = value, NAME => value, and
the operators of make and of shells that add or set by default."""
_FLAGGED = re.compile(
    rf"""(?<![\w-])--?(?P<name>{NAME})(?P<link>\\{{0,8}}["']?,?\s{{1,40}}|{ITEMS})"""
)
"""--name value, also as two items of a list."""
_CALLED = re.compile(
    rf"""\([ ]{{0,3}}["'](?P<name>{NAME})["'](?P<link>[ ]{{0,3}},[ ]{{0,3}})(?=["'])"""
)
"""putenv("NAME", "value")."""
_SETENV = re.compile(
    rf"\b(?:setenv|ENV|set(?:[ ]+-\w{{1,5}}){{1,3}})[ \t]+(?P<name>{NAME})(?P<link>[ \t]+)"
)
_TAG = re.compile(rf"<(?P<name>{NAME})(?P<link>(?:\s[^<>]{{0,200}})?>)(?=[^<>\s])")
"""<name>value</name>"""
_IN_TAG = re.compile(r"[^<>\n]+")
_ATTRIBUTES = re.compile(
    rf"""\b(?:key|name)=["'](?P<name>{NAME})["'](?P<link>\s{{1,10}}value=)(?=["'])"""
)
_PAIRED = re.compile(
    rf"""\b(?:key|name)\\{{0,8}}["']?\s{{0,10}}:\s{{0,10}}\\{{0,8}}["']?(?P<name>{NAME})"""
    r"""(?P<link>\\{0,8}["']?\s{0,10},?\s{0,40}\\{0,8}["']?value\\{0,8}["']?\s{0,10}:\s{0,10})(?=\S)"""
)
"""{"name": "NAME", "value": "value"}, and the same in YAML."""
_BLOCK = re.compile(
    rf"""(?m)^(?P<indent>[ ]*)(?:-[ ]+)?["']?(?P<name>{NAME})["']?(?P<link>[ ]*:[ ]*[|>][-+\d]*"""
    r"""[ ]*(?:\#.*)?\n(?:[ ]*\n)*(?P=indent)[ ]+)(?=\S)"""
)
"""A text of several lines in YAML, under its name."""
_LIST = re.compile(
    rf"""(?m)^(?P<indent>[ ]*)["']?(?P<name>{NAME})["']?(?P<link>[ ]*:[ ]*\n(?P=indent)[ ]*)"""
    r"""(?=-[ ])"""
)
"""A list in YAML, one item a line."""
_HEADER = re.compile(
    r"(?im)(?P<name>\b(?:proxy-)?authorization|\bx-[\w-]{0,60}?(?:key|token|secret)|"
    r"\b(?:set-)?cookie)(?P<link>\\{0,8}[\"']?\s{0,10}:\s{0,10}\\{0,8}[\"']?)"
    r"(?P<value>[^\r\n\"'\\]+)"
)
_BEARER = re.compile(r"(?i)\b(?:bearer|basic)\s{1,10}(?P<value>[\w.~+/=-]{8,})")
_NETRC = re.compile(
    r"\b(?:(?:login|user|account)\s{1,20}\S{1,200}|"
    r"machine\s{1,20}\S{1,200}(?:\s{1,20}(?:login|account|port)\s{1,20}\S{1,200}){0,3})"
    r"\s{1,20}password\s{1,20}(?P<value>[^\s\"'\\]+)"
)
_SAID = re.compile(
    r"(?P<name>(?i:\b\w*(?:password|passwd|passphrase|passcode|secret|token|api[ _-]?key))|"
    r"\b[A-Z]\w*_KEY)(?:\s{1,3}(?:for|of)\s{1,3}\S{1,60}?)?(?:\s{1,3}(?:is|was)|:)?\s{1,10}"
    r"(?P<value>(?=[^\s\d]*\d)(?=[^\sA-Za-z]*[A-Za-z])[^\s\"'`,;:/()]{6,})"
)
"""In a sentence: only what has letters and digits, since words follow there too."""
_HOOK = re.compile(
    r"(?i)\bhttps?://(?:hooks\.slack\.com/(?:services|workflows|triggers)/|"
    r"(?:\w{1,40}\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/|"
    r"[\w.-]{1,200}\.webhook\.office\.com/|"
    r"api\.telegram\.org/bot|maker\.ifttt\.com/trigger/[^\s/]{1,200}/(?:json/)?with/key/)"
    r"(?P<value>[^\s\"'`\\<>),;]+)"
)
"""Addresses that whoever knows them may write to."""
_URL = re.compile(
    r"\b[a-z][a-z0-9+.-]{1,20}://(?P<value>[^\s/\"'<>]+|"
    r"[^\s/\"'<>:@]{0,200}:(?!\d{1,5}/)[^\s\"'<>@:]{1,200})(?=@)",
    re.IGNORECASE,
)
"""With a slash in the password too, unless what stands before it is a port."""
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,60}PRIVATE KEY-----(?P<value>.*?)"
    r"(?=-----END [A-Z0-9 ]{0,60}PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_FORM = re.compile(
    r"(?<![\w-])(?P<value>sk-[\w-]{16,}|(?:gh[opsur]|github_pat|glpat|gldt|hf|npm|pypi|dop_v1|"
    r"wandb_v1)[_-][\w-]{16,}|xox[abeprs]-[\w-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|"
    r"ya29\.[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|SG\.[\w-]{16,}\.[\w-]{16,}|"
    r"AGE-SECRET-KEY-\w+|\d{8,10}:[A-Za-z0-9_-]{30,})"
)
"""Tokens whose makers gave them a form: GitHub, Hugging Face, Amazon, Google, Telegram, …"""
_HASH = re.compile(r"(?P<value>\$(?:[156y]|gy|2[abxy]|argon2\w{1,2})\$[\w./$,=+-]{12,})")
"""A password as /etc/shadow and htpasswd have it."""
_LONG = re.compile(r"(?<![\w+/=-])(?P<value>[\w+/=-]{24,})(?![\w+/=-])", re.ASCII)
_BEFORE_COMMIT = re.compile(r"\"git\": ?\"$|\b(?:commit|oid|revision)[ :=]\s*\"?$")
"""What stands before the version of the code, which is no secret and often asked for."""


@dataclass(frozen=True)
class Place:
    """Where something was taken out; never what."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


@dataclass(frozen=True)
class _Found:
    """A part of a text that is to go."""

    begin: int
    end: int
    what: str
    instead: str = MARK


Pass = Callable[[str], Iterator[_Found]]


def redact(text: str, file: str) -> tuple[str, list[Place]]:
    """`text` without secrets, and the places; `file` is what they are called."""
    places: list[Place] = []
    for look in _PASSES:
        text = _replace(text, file, look(text), places)
    return text, sorted(dict.fromkeys(places), key=lambda place: (place.line, place.what))


def _replace(text: str, file: str, every: Iterator[_Found], places: list[Place]) -> str:
    parts: list[str] = []
    end = counted = 0
    line = 1
    for found in every:
        line += text.count("\n", counted, found.begin)
        counted = found.begin
        places.append(Place(file, line, found.what))
        # A private key of ten lines stays ten lines, so that the line numbers go on being true.
        breaks = "\n" * text.count("\n", found.begin, found.end)
        parts += [text[end : found.begin], found.instead, breaks]
        end = found.end
    return "".join([*parts, text[end:]])


# ── by name ───────────────────────────────────────────────────────────────────────────────
Value = Callable[[re.Match[str]], re.Pattern[str]]


def _named(head: re.Pattern[str], value: Value) -> Pass:
    """What follows a name."""
    return lambda text: _following(head, value, text, 0, len(text))


def _named_in(command: re.Pattern[str], head: re.Pattern[str], value: Value) -> Pass:
    """The same within commands only."""

    def look(text: str) -> Iterator[_Found]:
        for match in command.finditer(text):
            yield from _following(head, value, text, *match.span())

    return look


def _following(
    head: re.Pattern[str], value: Value, text: str, place: int, end: int
) -> Iterator[_Found]:
    """In a value that may stay the search goes on: a command line is one."""
    while (match := head.search(text, place, end)) is not None:
        place = match.end()
        name = match["name"].strip("-")
        if secrecy(name) is None:
            continue
        told = value(match).match(text, place, end)
        if told is None or not is_secret(name, _content(told[0])):
            continue
        place = told.end()
        instead = _instead(told[0], match["link"])
        yield _Found(told.start(), told.end(), f"value of {name}", instead)


def _content(value: str) -> str:
    """Without quotes, those of bash included."""
    return re.sub(r"^\$(?=[\"'])", "", value).strip("\\\"'")


def _instead(value: str, link: str) -> str:
    """In the same quotes, and in some where JSON needs them."""
    quotes = re.fullmatch(r"\$?(\\*[\"']).*?(\\*[\"'])", value, re.DOTALL)
    if quotes and quotes[1] == quotes[2]:
        return f"{quotes[1]}{MARK}{quotes[2]}"
    key = re.search(r"(\\*\")\s*:\s*$", link)
    return f"{key[1]}{MARK}{key[1]}" if key else MARK


def _plain(_: re.Match[str]) -> re.Pattern[str]:
    return _VALUE


def _inner(_: re.Match[str]) -> re.Pattern[str]:
    return _IN_TAG


def _of_block(match: re.Match[str]) -> re.Pattern[str]:
    """All lines that are further in than the name."""
    inside = rf"[ ]{{{len(match['indent'])}}}[ ]+.*"
    return re.compile(rf"\S.*(?:\n(?:{inside}|[ ]*(?=\n)))*")


def _of_list(match: re.Match[str]) -> re.Pattern[str]:
    return re.compile(rf"-[ ].*(?:\n[ ]{{{len(match['indent'])}}}[ ]*-[ ].*)*")


# ── by form ───────────────────────────────────────────────────────────────────────────────
def _formed(pattern: re.Pattern[str], judge: Callable[[re.Match[str]], str | None]) -> Pass:
    """What has a form of its own; the judge says what it is called, or None: it may stay."""

    def look(text: str) -> Iterator[_Found]:
        for match in pattern.finditer(text):
            what = judge(match)
            if what is not None:
                instead = _instead(match["value"], "")
                yield _Found(*match.span("value"), what, instead)

    return look


def _known(what: str) -> Callable[[re.Match[str]], str | None]:
    def judge(match: re.Match[str]) -> str | None:
        value = _content(match["value"].strip())
        return None if value.startswith(MARK[:-1]) or tells_nothing(value) else what

    return judge


def _user(match: re.Match[str]) -> str | None:
    """Numbers are a user's and a group's; an address is no user."""
    value = match["value"].strip("\\\"'")
    if re.fullmatch(r"\d+:\d+", value) or "://" in value or MARK in value:
        return None
    return "user and password of a command"


def _said(match: re.Match[str]) -> str | None:
    if secrecy(match["name"]) is None or tells_nothing(match["value"]):
        return None
    return f"what follows {match['name']}"


def _login(match: re.Match[str]) -> str | None:
    """In a sentence a word follows."""
    return None if match["value"] in AFTER_LOGIN else _known("a key of a command")(match)


def _header(match: re.Match[str]) -> str | None:
    return None if match["value"].strip() == MARK else f"value of {match['name']}"


def _random(match: re.Match[str]) -> str | None:
    before = match.string[max(0, match.start() - 40) : match.start()]
    return None if _BEFORE_COMMIT.search(before) else looks_random(match["value"])


_PASSES: tuple[Pass, ...] = (
    _formed(_PRIVATE_KEY, _known("a private key")),
    _named(_BLOCK, _of_block),
    _named(_LIST, _of_list),
    _formed(_HOOK, _known("an address to write to")),
    _formed(_URL, _known("user and password of an address")),
    _formed(_HEADER, _header),
    _formed(_BEARER, _known("credentials of a request")),
    _formed(ORACLE, _known("user and password of a database")),
    _formed(LOGIN, _login),
    _formed(VAULT, _login),
    *(
        _formed(pattern, _known("a password for a command"))
        for pattern in (PIPED, HERE, HERE_TEXT, TRACED, TRACED_AFTER)
    ),
    _formed(PLACED, _known("a password of a command")),
    _named_in(CONFIGURE, PAIR, _plain),
    _formed(PASSWORD_OPTION, _known("a password of a command")),
    _formed(USER_OPTION, _user),
    _formed(LFTP, _known("user and password of a command")),
    _formed(_NETRC, _known("a password")),
    _named(_TAG, _inner),
    _named(_ATTRIBUTES, _plain),
    _named(_PAIRED, _plain),
    _named(_CALLED, _plain),
    _named(_SETENV, _plain),
    _named(_ASSIGNED, _plain),
    _named(_FLAGGED, _plain),
    _formed(_SAID, _said),
    _formed(_FORM, _known("a token")),
    _formed(_HASH, _known("a hashed password")),
    _formed(_LONG, _random),
)

"""What is a secret: by the name of a value, or by the look of a word. Pure."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import functools
import itertools
import re

_ALWAYS = frozenset({
    "password", "passwords", "passwd", "passphrase", "pw", "secret", "secrets",
    "credential", "credentials", "apikey", "accesskey", "secretkey", "privatekey", "authtoken",
    "accesstoken", "bearer", "cookie", "cookies", "netrc", "htpasswd", "passcode", "passkey",
    "passin", "passout", "pswd", "psw", "creds", "jwt", "salt", "otp", "webhook", "webhooks",
    "pwd",
})  # fmt: skip
"""Parts of a name that make a secret of any value."""
_ENDINGS = ("password", "passwd", "passphrase", "passcode", "pass", "secret")
"""The same where they are the end of a part: PGPASSWORD, MYPASS, clientsecret."""
_PASSING = frozenset(
    {"bypass", "compass", "lowpass", "highpass", "bandpass", "allpass", "encompass", "pass"}
)
"""Words with such an end that are none, or not always."""
_MOSTLY = frozenset({
    "token", "tokens", "key", "keys", "auth", "authorization", "signature", "sig", "pass", "pat",
})  # fmt: skip
"""The same, but `max_tokens=4096` and `key: 3` are counts."""
_LONG_NUMBER = 6
"""Digits of a number that is no count any more where one thing is named: `token: 1234567890`."""
_HARMLESS = frozenset({"keyerror"})
"""Whole names that are not: a traceback's last line."""
_DIRECTORIES = frozenset({"pwd", "oldpwd"})
"""Whole names of directories, and, in connection strings, of passwords."""
_IS_PATH = re.compile(r"[/~.$]|[A-Za-z]:[\\/]")
_NOTHING = re.compile(
    r"(?i)(?:\(?null\)?|none|true|false|yes|no|ok|passed|failed|auth/\w+|cred/\w+|n/a|\*+|"
    r"\[redacted\]|<[\w -]*>|\$\{?\w+\}?|\$\([^)]*\)|[|>][-+]?\d?|[\[({]+)"
)
"""Values that tell nothing: empty ones, names of other variables, the beginning of a block."""
_NUMBER = r"[-+]?[\d._]+(?:e[-+]?\d+)?"
_COUNT = re.compile(rf"{_NUMBER}|[\[(]\s*(?:{_NUMBER}\s*,?\s*)*[\])]", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_LONG_HEX = 32
_LONG_PIECE = 12
_RANDOM_CHANGES = 0.3


def tells_nothing(value: str) -> bool:
    return not value or _NOTHING.fullmatch(value) is not None


def is_secret(name: str, value: str) -> bool:
    """Whether a value of that name, without its quotes, must not be told."""
    kind = secrecy(name)
    if kind is None or tells_nothing(value):
        return False
    if kind == "unless a directory":
        return _IS_PATH.match(value) is None
    return kind == "always" or not _is_count(value, several=name.lower().endswith("s"))


@functools.lru_cache(maxsize=4096)
def secrecy(name: str) -> str | None:
    """'always', 'mostly' or 'unless a directory' for a name like a secret's, else None."""
    if name.lower() in _HARMLESS:
        return None
    if name.lower() in _DIRECTORIES:
        return "unless a directory"
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    words = {part.lower() for part in parts} | {name.lower()}
    if words & _ALWAYS or any(word.endswith(_ENDINGS) for word in words - _PASSING):
        return "always"
    return "mostly" if words & _MOSTLY else None


def _is_count(value: str, *, several: bool) -> bool:
    if not several and value.isdecimal() and len(value) >= _LONG_NUMBER:
        return False
    return _COUNT.fullmatch(value) is not None


def looks_random(word: str) -> str | None:
    """What to call a long word that nobody has written by hand; None: somebody may have."""
    if _UUID.fullmatch(word.strip("=")):
        return None
    longest = max(re.findall(r"[A-Za-z0-9]+", word), key=len, default="")
    if len(longest) >= _LONG_HEX and re.fullmatch(r"[0-9a-f]+|[0-9A-F]+", longest):
        return None if longest.isdecimal() else "a long hexadecimal word"
    return "a long random word" if len(longest) >= _LONG_PIECE and _mixed(word) else None


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

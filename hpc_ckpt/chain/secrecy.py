"""What is a secret: by the name of a value, or by the look of a word. Pure."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass

_ALWAYS = frozenset({
    "password", "passwords", "passwd", "passphrase", "pw", "secret", "secrets",
    "credential", "credentials", "apikey", "accesskey", "secretkey", "privatekey", "authtoken",
    "accesstoken", "bearer", "cookie", "cookies", "netrc", "htpasswd", "passcode", "passkey",
    "passin", "passout", "pswd", "psw", "creds", "jwt", "salt", "otp", "webhook", "webhooks",
    "pwd",
})  # fmt: skip
"""Parts of a name that make a secret of any value."""
_ENDINGS = ("password", "passwd", "passphrase", "passcode", "pass", "secret", "apikey")
"""The same where they are the end of a part: PGPASSWORD, MYPASS, clientsecret."""
_PASSING = frozenset(
    {"bypass", "compass", "lowpass", "highpass", "bandpass", "allpass", "encompass", "pass"}
)
"""Words with such an end that are none, or not always."""
_MOSTLY = frozenset({"auth", "authorization", "signature", "sig", "pass", "pat"})
"""The same, but `pass: 3` is a count."""


@dataclass(frozen=True)
class _Stem:
    """The end of a part that makes a secret of most values: `MYTOKEN`, `wandb_key`."""

    form: re.Pattern[str]
    words: frozenset[str]
    """Words with such an end that have nothing to do with it."""
    beside: frozenset[str]
    """Parts of the same name that make it one of models, data and programs."""


_STEMS = (
    _Stem(
        re.compile(r"(?P<before>[a-z]*?)tok(?:en)?s?"),
        frozenset({"tiktok", "vostok"}),
        frozenset({
            "pad", "padding", "eos", "bos", "cls", "sep", "unk", "unknown", "mask", "special",
            "additional", "added", "stop", "start", "end", "eot", "eod", "sos", "next", "prev",
            "max", "min", "num", "n", "total", "per", "avg", "mean", "count", "prompt",
            "completion", "generated", "image", "audio", "video", "text", "word", "sub", "type",
            "embed", "embedding", "embeddings", "emb", "weight", "bias", "shape", "size", "dim",
            "de", "multi", "non", "input", "output", "target", "vocab",
        }),
    ),
    _Stem(
        re.compile(r"(?P<before>[a-z]*?)keys?"),
        frozenset({
            "monkey", "monkeys", "donkey", "donkeys", "turkey", "turkeys", "hockey", "jockey",
            "whiskey", "lackey", "mickey", "okey", "hotkey", "hotkeys", "lowkey", "malarkey",
        }),
        frozenset({
            "query", "past", "states", "state", "proj", "projection", "padding", "pad", "mask",
            "attention", "attn", "weight", "bias", "norm", "shape", "size", "dim", "heads", "sort",
            "sorted", "by", "order", "primary", "foreign", "dict", "cache", "index", "group",
            "partition", "row", "column", "sub", "missing", "unexpected", "extra", "error", "prng",
            "rng", "random", "type", "func", "fn", "metric", "monitor",
        }),
    ),
)  # fmt: skip
_FIRM = frozenset({
    "api", "auth", "oauth", "access", "private", "session", "refresh", "license", "licence",
})  # fmt: skip
"""Parts that make a secret of such a name whatever else stands in it."""
_EVERYDAY = frozenset({"key", "keys", "tokens"})
"""Whole names that are as often those of an entry or of a text's parts: `key: value`."""
_LONG_NUMBER = 6
"""Digits of a number that is no count any more where one thing is named: `token: 1234567890`."""
_HARMLESS = frozenset({"keyerror"})
"""Whole names that are not: a traceback's last line."""
_DIRECTORIES = frozenset({"pwd", "oldpwd"})
"""Whole names of directories, and, in connection strings, of passwords."""
_WORD = re.compile(
    r"-|\w{1,4}|[A-Za-z]{1,20}|"
    r"[A-Za-z]{1,40}\d{0,2}(?:[._/:-]{1,2}(?:[A-Za-z]{1,40}\d{0,2}|\d{1,3})){1,40}"
)
"""What somebody calls an entry: `loss`, `layer1.0.weight`."""
_IS_PATH = re.compile(r"[/~.$]|[A-Za-z]:[\\/]")
_NOTHING = re.compile(
    r"(?i)(?:\(?null\)?|none|true|false|yes|no|ok|passed|failed|auth/\w+|cred/\w+|n/a|\*+|"
    r"\[redacted\]|<[\w -]*>|\$\{?\w+\}?|\$\((?:(?:cat|<)\s*[\w./~${}-]+|\w*)\)|"
    r"[|>][-+]?\d?|[\[({]+)"
)
"""Values that tell nothing: empty ones, names of other variables and of files, the beginning of a
block."""
_COUNT = re.compile(
    r"[-+]?[\d._,]+(?:e[-+]?\d+)?(?:[kmgtb]|%)?(?:/s)?|[-+]?(?:nan|inf)|[\[(][\d._,e+\s-]*[\])]",
    re.IGNORECASE,
)
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
    if kind == "unless words" and _all_words(value):
        return False
    return kind == "always" or not _is_count(value, several=name.lower().endswith("s"))


@functools.lru_cache(maxsize=4096)
def secrecy(name: str) -> str | None:
    """'always', 'mostly' or 'unless …' what for a name like a secret's, else None."""
    if name.lower() in _HARMLESS:
        return None
    if name.lower() in _EVERYDAY:
        return "unless words"
    if name.lower() in _DIRECTORIES:
        return "unless a directory"
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    words = {part.lower() for part in parts} | {name.lower()}
    if words & _ALWAYS or any(word.endswith(_ENDINGS) for word in words - _PASSING):
        return "always"
    if len(parts) > 1 and parts[-1].lower() == "api":
        return "mostly"  # OPENAI_API
    return "mostly" if words & _MOSTLY or any(_has(words, stem) for stem in _STEMS) else None


def _has(words: set[str], stem: _Stem) -> bool:
    """Whether one of them ends like that, and none says that it is something else."""
    ends = [match for word in words - stem.words if (match := stem.form.fullmatch(word))]
    others = words | {match["before"] for match in ends}
    return bool(ends) and (bool(others & _FIRM) or not others & stem.beside)


def _all_words(value: str) -> bool:
    return all(_WORD.fullmatch(word) for word in re.findall(r"[^\s,\[\](){}'\"]+", value))


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

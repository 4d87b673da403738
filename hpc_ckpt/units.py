"""Durations, sizes and the strings Slurm writes them in. Text in, numbers out, and back.

Users write what people write ("8h", "1:30:00", "10 min", "32G"); everything inside the house
is seconds and bytes.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import re

from .errors import SpecError

_DURATION_UNITS = {
    "ms": 0.001,
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "m": 60.0, "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hr": 3600.0, "hrs": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
    "w": 604800.0, "week": 604800.0, "weeks": 604800.0,
}  # fmt: skip
_SIZE_STEPS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)", re.ASCII)
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgtp]?)(i?)(b?)", re.ASCII | re.IGNORECASE)


def parse_duration(text: str | int | float) -> float:
    """Seconds. A bare number is seconds; "1:30" is minutes:seconds as Slurm reads it.

    >>> parse_duration("8h"), parse_duration("1:30:00"), parse_duration("1h 30 min")
    (28800.0, 5400.0, 5400.0)
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return _positive(float(text), text)
    cleaned = str(text).strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", cleaned, re.ASCII):
        return _positive(float(cleaned), text)
    if ":" in cleaned or re.fullmatch(r"\d+-\d+", cleaned):
        return _parse_clock(cleaned)
    return _parse_parts(cleaned)


def _positive(seconds: float, text: object) -> float:
    if not math.isfinite(seconds) or seconds < 0:
        raise _not_a_duration(text)
    return seconds


def _parse_clock(text: str) -> float:
    """Slurm's forms: M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    match = _CLOCK.fullmatch(text)
    if match is None:
        raise _not_a_duration(text)
    days, first, second, third = (int(group) if group else None for group in match.groups())
    if days is not None:
        return float(days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0))
    if third is None:
        return float((first or 0) * 60 + (second or 0))
    return float((first or 0) * 3600 + (second or 0) * 60 + third)


def _parse_parts(text: str) -> float:
    total, end = 0.0, 0
    for match in _PART.finditer(text):
        if text[end : match.start()].strip() or match[2] not in _DURATION_UNITS:
            raise _not_a_duration(text)
        total += float(match[1]) * _DURATION_UNITS[match[2]]
        end = match.end()
    if end == 0 or text[end:].strip():
        raise _not_a_duration(text)
    return total


def _not_a_duration(text: object) -> SpecError:
    return SpecError(f"{text!r} is not a duration; write 90s, 10 min, 8h, 1:30:00 or 2-00:00:00")


def format_duration(seconds: float) -> str:
    """Short, for people, and read back by parse_duration without loss above a millisecond.

    >>> format_duration(5400), format_duration(90), format_duration(0.25)
    ('1h 30m', '1m 30s', '250ms')
    """
    if seconds < 0:
        return "-" + format_duration(-seconds)
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    parts, rest = [], milliseconds
    for size, unit in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m")):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    if rest:
        parts.append(f"{rest / 1000:g}s" if rest % 1000 else f"{rest // 1000}s")
    return " ".join(parts)


def slurm_time(seconds: float) -> str:
    """Slurm's --time: whole minutes, rounded up as Slurm itself would.

    >>> slurm_time(90), slurm_time(100 * 3600)
    ('00:02:00', '4-04:00:00')
    """
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{minutes:02d}:00"
    return f"{days}-{clock}" if days else clock


def parse_size(text: str | int) -> int:
    """Bytes, in powers of 1024 as Slurm counts them.

    >>> parse_size("32G"), parse_size("1.5 MiB"), parse_size(10)
    (34359738368, 1572864, 10)
    """
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise SpecError(f"{text!r} is not a size; write 512M, 32G or 1T")
    return round(float(match[1]) * float(1024 ** _SIZE_STEPS[match[2].upper()]))


def format_size(count: float) -> str:
    """Short, for people.

    >>> format_size(34359738368), format_size(1572864), format_size(10)
    ('32 GiB', '1.5 MiB', '10 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}" if abs(count) >= 1000 else f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} PiB"


def slurm_memory(count: int) -> str:
    """Slurm's --mem, in whole MiB rounded up.

    >>> slurm_memory(34359738368)
    '32768M'
    """
    return f"{math.ceil(count / 1024**2)}M"


def parse_array(text: str) -> tuple[list[int], int | None]:
    """Indices and throttle of an --array expression.

    >>> parse_array("1-3,7,10-14:2%1")
    ([1, 2, 3, 7, 10, 12, 14], 1)
    """
    body, _, throttle = text.partition("%")
    indices: list[int] = []
    for part in body.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", part.strip())
        if match is None or (throttle and not throttle.isdecimal()):
            raise SpecError(f"{text!r} is not an array expression; write 1-10%1")
        first, last = int(match[1]), int(match[2] or match[1])
        indices.extend(range(first, last + 1, int(match[3] or 1)))
    return indices, int(throttle) if throttle else None


def format_array(indices: list[int], throttle: int | None = None) -> str:
    """The shortest expression of plain ranges.

    >>> format_array([1, 2, 3, 7], 1)
    '1-3,7%1'
    """
    ranges: list[list[int]] = []
    for index in sorted(set(indices)):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    body = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"{body}%{throttle}" if throttle else body


def expand_nodes(text: str) -> list[str]:
    """The hosts of a Slurm node list.

    >>> expand_nodes("c[01-03,7],login")
    ['c01', 'c02', 'c03', 'c7', 'login']
    """
    return [host for part in _split_outside_brackets(text) for host in _expand_one(part)]


def _split_outside_brackets(text: str) -> list[str]:
    return [part for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text) if part]


def _expand_one(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\]]+)\](.*)", part)
    if match is None:
        return [part]
    hosts = []
    for item in match[2].split(","):
        first, _, last = item.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise SpecError(f"{part!r} is not a node list")
        for number in range(int(first), int(last or first) + 1):
            hosts.extend(_expand_one(f"{match[1]}{number:0{len(first)}d}{match[3]}"))
    return hosts

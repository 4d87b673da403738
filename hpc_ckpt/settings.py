"""What a running program may be told: settings from the call, a file and the environment.

Also the two small languages users write inside them: policy expressions ("every 10 min") and
retention ("last: 3"). chain/spec.py checks a spec with the same parsers, so that a mistake is
found at submission and not on the compute node.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import difflib
import json
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import SpecError
from .policy.base import Policy
from .policy.interval import EverySteps, EveryTime
from .tiers.wishes import ONLY_HOME, TierWish, parse_tiers
from .units import parse_duration, parse_size

ENV_PREFIX = "HPC_CKPT__"
DEFAULT_POLICY = "every 10 min"
"""The Northeastern course's advice: every 10 to 15 minutes is okay."""
LATER_POLICIES = ("young", "daly", "checkfreq", "coci")
CHECKPOINT_KEYS = ("policy", "keep", "memory")
LEAST_MEMORY = 1024**2
MARGIN_SHARE = 0.04
MARGIN_LEAST_S = 0.5
MARGIN_MOST_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Best:
    """Keep the checkpoint with the best value of one metric."""

    metric: str
    mode: str = "max"

    def __post_init__(self) -> None:
        if self.mode not in ("max", "min"):
            raise SpecError(f"keep.best.mode: must be max or min, not {self.mode!r}")


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What retention leaves in place, besides pins and the newest verified checkpoint."""

    last: int = 3
    """The newest N."""
    every: int | None = None
    """Those whose step is a multiple of this."""
    best: Best | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if isinstance(value, str) or (value is None and name == "last"):
                raise SpecError(f"keep.{name}: must be a whole number, not {value!r}")
            if value is not None:
                _count(value, f"keep.{name}")

    @property
    def lasting(self) -> bool:
        """Whether something is kept for another reason than being new."""
        return self.every is not None or self.best is not None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything resolved; one object for the whole runtime."""

    policy: Policy = field(default_factory=lambda: EveryTime(600.0))
    keep: Keep = field(default_factory=Keep)
    signal: signal.Signals = signal.SIGUSR1
    """The site's warning signal; SIGTERM is always caught as well."""
    memory: int | None = None
    """The most bytes of host memory that snapshots may use; None: what is free."""
    tiers: tuple[TierWish, ...] = ONLY_HOME
    """Where checkpoints go, fastest first."""
    notes: tuple[str, ...] = ()
    """What the user should be told once, such as what 'auto' means here."""


def parse_policy(text: object, where: str = "checkpoint.policy") -> Policy:
    """The policy an expression names; raises SpecError that lists what can be written."""
    words = " ".join(str(text).split()).lower()
    if words == "auto":
        return parse_policy(DEFAULT_POLICY)
    if words in LATER_POLICIES:
        raise SpecError(f"{where}: policy {words!r} is not available in this version; {_CHOICES}")
    steps = re.fullmatch(r"every (?:(\d+) )?steps?", words)
    if steps is not None:
        return EverySteps(_at_least_one(int(steps[1] or 1), where))
    if words.startswith("every "):
        return EveryTime(_interval(words.removeprefix("every "), where))
    raise SpecError(f"{where}: {str(text)!r} is not a policy; {_CHOICES}")


_CHOICES = "write 'every 500 steps', 'every 10 min' or 'auto'"


def _at_least_one(count: int, where: str) -> int:
    if count < 1:
        raise SpecError(f"{where}: must be at least 1, not {count}")
    return count


def _interval(text: str, where: str) -> float:
    if re.fullmatch(r"[a-z]+", text):
        text = f"1 {text}"
    try:
        seconds = parse_duration(text)
    except SpecError as error:
        raise SpecError(f"{where}: {error}; {_CHOICES}") from None
    if seconds <= 0:
        raise SpecError(f"{where}: the interval must be longer than nothing; {_CHOICES}")
    return seconds


def parse_keep(value: object, where: str = "checkpoint.keep") -> Keep:
    """Retention from a number (the newest N) or a mapping with last, every, best."""
    if isinstance(value, Keep):
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return Keep(last=_at_least_one(value, f"{where}.last"))
    if not isinstance(value, Mapping):
        raise SpecError(f"{where}: write a number or {{last: 3, every: 10000, best: …}}")
    reject_unknown(value, ("last", "every", "best"), where)
    every = value.get("every")
    best = value.get("best")
    return Keep(
        last=_count(value.get("last", 3), f"{where}.last"),
        every=None if every is None else _count(every, f"{where}.every"),
        best=None if best is None else _parse_best(best, f"{where}.best"),
    )


def _parse_best(value: object, where: str) -> Best:
    if isinstance(value, str):
        value = {"metric": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("metric"), str):
        raise SpecError(f"{where}: write {{metric: accuracy, mode: max}}")
    reject_unknown(value, ("metric", "mode"), where)
    mode = value.get("mode", "max")
    if mode not in ("max", "min"):
        raise SpecError(f"{where}.mode: must be max or min, not {mode!r}")
    return Best(metric=value["metric"], mode=mode)


def _count(value: object, where: str) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{where}: must be a whole number, not {value!r}")
    return _at_least_one(value, where)


def parse_memory(value: Any, where: str = "checkpoint.memory") -> int:
    """Bytes from a size; a bare number is more often a mistake than a wish for bytes."""
    try:
        size = parse_size(value)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None
    if size < LEAST_MEMORY:
        raise SpecError(f"{where}: {value!r} is less than 1 MiB; say the unit: 512M, 8G")
    return size


def parse_signal(name: object, where: str = "signal.name") -> signal.Signals:
    """The signal a profile names, with or without SIG."""
    text = str(name).upper()
    full = text if text.startswith("SIG") else f"SIG{text}"
    try:
        return signal.Signals[full]
    except KeyError:
        raise SpecError(f"{where}: {name!r} is not a signal; write USR1 or USR2") from None


def reject_unknown(value: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise a SpecError that names the first unknown key and the nearest known one."""
    names = tuple(known)
    for key in value:
        if key not in names:
            raise SpecError(f"{where}: {unknown_key(str(key), names)}")


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The sentence for a key nobody knows."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(names)}."
    return f"unknown key {key!r}. {hint}"


def environment_overlay(environ: Mapping[str, str]) -> dict[str, Any]:
    """HPC_CKPT__CHAIN__MAX_LINKS=5 as {"chain": {"max_links": "5"}}; values stay text."""
    overlay: dict[str, Any] = {}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX):
            continue
        *parents, last = name.removeprefix(ENV_PREFIX).lower().split("__")
        place = overlay
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise SpecError(f"environment variable {name}: its parent is set as a value too")
        place[last] = environ[name]
    return overlay


def merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` over `low`, mapping by mapping; lists and scalars are replaced whole."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type] # narrowed by `both`
    return merged


def resolve(
    *,
    call: Mapping[str, Any] | None = None,
    file: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settings for a running program: environment over call over file over default.

    Only `checkpoint` and `tiers` concern a running program; HPC_CKPT__CHAIN__… and the like
    are the chain's and are left to it.
    """
    environ = os.environ if environ is None else environ
    from_file = _read_file(file)
    variables, given = environment_overlay(environ), _given(call or {})
    said_of_tiers = {
        f"environment variable {ENV_PREFIX}TIERS": variables.get("tiers"),
        "Checkpointer(tiers=…)": given.pop("tiers", None),
        "tiers": from_file.get("tiers"),
    }
    overlay = variables.get("checkpoint", {})
    section = merge(from_file.get("checkpoint") or {}, given)
    section = merge(section, overlay if isinstance(overlay, Mapping) else {})
    reject_unknown(section, CHECKPOINT_KEYS, "checkpoint")
    policy = section.get("policy", "auto")
    memory = section.get("memory")
    site_signal = (from_file.get("signal") or {}).get("name", "USR1")
    return Settings(
        policy=policy if _is_policy(policy) else parse_policy(policy),
        keep=parse_keep(section["keep"]) if section.get("keep") is not None else Keep(),
        signal=parse_signal(site_signal),
        memory=None if memory is None else parse_memory(memory),
        tiers=_tiers(said_of_tiers, from_file.get("storage") or {}, environ),
        notes=(auto_note(),) if policy == "auto" and "policy" in section else (),
    )


def _tiers(
    sources: Mapping[str, object], storage: object, environ: Mapping[str, str]
) -> tuple[TierWish, ...]:
    """What the first source says that says anything; lists are replaced whole."""
    for where, value in sources.items():
        if value is not None:
            return parse_tiers(value, storage, environ=environ, cwd=Path.cwd(), where=where)
    return ONLY_HOME


SAVE_FACTOR = 1.5
"""The next save may be slower than any yet seen."""


def margin(link_s: float) -> float:
    """Spare seconds before the deadline of a link of this length.

    >>> margin(600), margin(5), margin(8 * 3600)
    (24.0, 0.5, 30.0)
    """
    return min(max(MARGIN_SHARE * link_s, MARGIN_LEAST_S), MARGIN_MOST_S)


def auto_note() -> str:
    return f"policy 'auto' means {DEFAULT_POLICY!r} in this version"


def _given(call: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call.items() if value is not None}


def _is_policy(value: object) -> bool:
    return not isinstance(value, str) and callable(getattr(value, "decide", None))


def _read_file(source: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """The sections of a settings file: chain.json, or a JSON/YAML file with `checkpoint:`."""
    if source is None:
        return {}
    if isinstance(source, Mapping):
        return dict(source)
    record = _parse_file(Path(source))
    if "spec" not in record and "profile" not in record:
        return record
    return {
        "checkpoint": (record.get("spec") or {}).get("checkpoint"),
        "signal": (record.get("profile") or {}).get("signal"),
        "tiers": (record.get("spec") or {}).get("tiers"),
        "storage": (record.get("profile") or {}).get("storage"),
    }


def _parse_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"settings file {path}: {error.strerror}") from None
    try:
        record = json.loads(text)
    except ValueError:
        record = _parse_yaml(path, text)
    if not isinstance(record, dict):
        raise SpecError(f"settings file {path}: must be a mapping with 'checkpoint:'")
    return record


def _parse_yaml(path: Path, text: str) -> object:
    import yaml  # only a user's own YAML file needs it; the link runner must not

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"settings file {path}: not YAML: {error}") from None

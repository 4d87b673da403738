"""Which value wins: packaged < /etc < user < project < given < environment < command line.

Reads the files, lays them over each other, checks the result and remembers where every value
came from. What the keys mean is spec.py's and profile.py's business.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from .. import resources
from ..errors import SpecError
from ..settings import ENV_PREFIX
from ..tiers.wishes import anchored
from .complaints import DEFAULT, first_complaint, known_path, nearest
from .fields import Section
from .profile import Profile
from .slurm import sbatch_defaults
from .spec import Spec, locate
from .yamltext import Value, at_path, from_python, read_file

ENV_PROFILE = "HPC_CKPT_PROFILE"
_NOTHING = Value({}, DEFAULT)

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Places:
    """Where layers are looked for."""

    packaged: Path
    """Profiles that travel with the package."""
    site: Path
    user: Path | None
    project: Path

    @classmethod
    def usual(cls, cwd: Path, environ: Mapping[str, str]) -> Places:
        config = environ.get("XDG_CONFIG_HOME") or None
        home = environ.get("HOME") or None
        above = Path(config) if config else Path(home) / ".config" if home else None
        return cls(
            packaged=resources.folder("clusters"),
            site=Path("/etc/hpc_ckpt"),
            user=above / "hpc_ckpt" if above else None,
            project=cwd / "hpc_ckpt.yaml",
        )

    def spec_files(self) -> list[Path]:
        folders = [folder for folder in (self.site, self.user) if folder is not None]
        return [*(folder / "spec.yaml" for folder in folders), self.project]

    def profile_files(self, name: str) -> list[Path]:
        above = [folder / "clusters" for folder in (self.site, self.user) if folder is not None]
        return [folder / f"{name}.yaml" for folder in (self.packaged, *above)]

    def profile_names(self) -> list[str]:
        found = (path.parent.glob("*.yaml") for path in self.profile_files("*"))
        return sorted({path.stem for paths in found for path in paths})


class Option(NamedTuple):
    """One option of the command line: `Option("--max-links", "chain.max_links", 5)`."""

    flag: str
    key: str
    value: object


class Row(NamedTuple):
    """One line of `config show --origin`."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class Loaded:
    """Spec and profile as resolved, with the origin of everything in them."""

    spec: Spec
    profile: Profile
    spec_value: Value
    profile_value: Value

    def spec_rows(self) -> list[Row]:
        return list(_rows(self.spec.model_dump(mode="json"), self.spec_value, ()))

    def profile_rows(self) -> list[Row]:
        return list(_rows(self.profile.model_dump(mode="json"), self.profile_value, ()))


def load(
    given: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    options: Iterable[Option] = (),
    profile: str | os.PathLike[str] | None = None,
    live_cluster: str | None = None,
    cwd: Path,
    environ: Mapping[str, str],
    places: Places | None = None,
) -> Loaded:
    """Everything that was asked for. `given` is the user's spec: a file, a mapping or nothing."""
    places = places or Places.usual(cwd, environ)
    spec_value = _lay([*_from_slurm(environ), *_spec_files(places, cwd), *_given(given, cwd)])
    profile_value = _profile(profile, live_cluster, cwd, environ, places)
    for path, value in [*_from_environment(environ), *_from_options(options)]:
        if known_path(Spec, path):
            spec_value = _put(value, path, spec_value)
        elif known_path(Profile, path):
            profile_value = _put(value, _as_spelt(path, profile_value), profile_value)
        else:
            raise SpecError(f"{value.origin}: {nearest(path, (Spec, Profile))}")
    spec = _checked(Spec, spec_value)
    try:
        root = locate(spec.root, cwd=cwd, environ=environ)
    except SpecError as error:
        raise SpecError(f"{_origin(spec_value, ('root',))}: root: {error}") from None
    return Loaded(
        spec=spec.model_copy(update={"root": str(root), "tiers": anchored(spec.tiers, cwd)}),
        profile=_checked(Profile, profile_value),
        spec_value=spec_value,
        profile_value=profile_value,
    )


# ── files ─────────────────────────────────────────────────────────────────────────────────
def _spec_files(places: Places, cwd: Path) -> list[Value]:
    return [_read(path, cwd) for path in places.spec_files() if _exists(path)]


def _given(given: str | os.PathLike[str] | Mapping[str, Any] | None, cwd: Path) -> list[Value]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [from_python(given, "call")]
    return [read_file(cwd / given, os.fspath(given))]


def _profile(
    wanted: str | os.PathLike[str] | None,
    live_cluster: str | None,
    cwd: Path,
    environ: Mapping[str, str],
    places: Places,
) -> Value:
    """Asked for, then $HPC_CKPT_PROFILE, then the live cluster's, then local."""
    name = os.fspath(wanted) if wanted else environ.get(ENV_PROFILE) or None
    if name is not None and ("/" in name or name.endswith((".yaml", ".yml"))):
        named = from_python({"cluster": Path(name).stem}, DEFAULT)
        return read_file(cwd / name, name).over(named)
    if name is not None or live_cluster is None:
        return _named_profile(name or "local", cwd, places)
    return _live_profile(live_cluster, cwd, places)


def _named_profile(name: str, cwd: Path, places: Places) -> Value:
    found = [_read(path, cwd) for path in places.profile_files(name) if _exists(path)]
    if not found:
        known = ", ".join(places.profile_names())
        raise SpecError(
            f"no profile is named {name!r}; known: {known}. "
            f"A file is given by its path: ./{name}.yaml"
        )
    return _lay([from_python({"cluster": name}, DEFAULT), *found])


def _live_profile(cluster: str, cwd: Path, places: Places) -> Value:
    """A cluster nobody has described works with the defaults."""
    files = places.profile_files(cluster)
    if cluster == "local":
        files = files[1:]  # a cluster that happens to be called so still has a Slurm
    found = [_read(path, cwd) for path in files if _exists(path)]
    return _lay([from_python({"cluster": cluster}, "the live cluster"), *found])


def _exists(path: Path) -> bool:
    """Only a file that is not there is passed over; one that cannot be read is an error."""
    return os.path.lexists(path)


def _read(path: Path, cwd: Path) -> Value:
    return read_file(path, str(path.relative_to(cwd) if path.is_relative_to(cwd) else path))


def _lay(layers: Sequence[Value]) -> Value:
    result = _NOTHING
    for layer in layers:
        result = layer.over(result)
    return result


# ── environment and command line ──────────────────────────────────────────────────────────
def _from_environment(environ: Mapping[str, str]) -> list[tuple[tuple[str, ...], Value]]:
    names = sorted(name for name in environ if name.startswith(ENV_PREFIX))
    paths = {name: tuple(name.removeprefix(ENV_PREFIX).lower().split("__")) for name in names}
    for name, path in paths.items():
        for other, longer in paths.items():
            if len(longer) > len(path) and longer[: len(path)] == path:
                raise SpecError(f"environment variable {name}: {other} is set too; keep one")
    return [(path, _variable(name, environ[name])) for name, path in paths.items()]


def _from_slurm(environ: Mapping[str, str]) -> list[Value]:
    """What a site or a user has set for sbatch: shown in the plan, and the same in every link."""
    return [
        at_path((key,), _variable(name, environ[name]))
        for name, key in sbatch_defaults(environ).items()
    ]


def _variable(name: str, value: str) -> Value:
    return Value(value, f"environment variable {name}")


def _from_options(options: Iterable[Option]) -> list[tuple[tuple[str, ...], Value]]:
    return [
        (tuple(option.key.split(".")), from_python(option.value, option.flag))
        for option in options
        if option.value is not None
    ]


def _put(value: Value, path: tuple[str, ...], document: Value) -> Value:
    return Value(at_path(path, value).over(document).content, document.origin)


def _as_spelt(path: tuple[str, ...], profile: Value) -> tuple[str, ...]:
    """Environment variables lose the case of a name of the site's own; the profile has it."""
    named = profile.at(path[:1])
    if len(path) < 2 or path[0] not in ("partitions", "storage") or named is None:
        return path
    known = named.content if isinstance(named.content, dict) else {}
    spelt = {name.lower(): name for name in known}
    return (path[0], spelt.get(path[1], path[1]), *path[2:])


# ── checking and showing ──────────────────────────────────────────────────────────────────
def _checked(model: type[S], value: Value) -> S:
    try:
        return model.model_validate(value.plain())
    except ValidationError as error:
        raise SpecError(first_complaint(error, model, value)) from None


def _origin(value: Value, path: Sequence[str | int]) -> str:
    found = value.at(path)
    return DEFAULT if found is None else found.origin


def _rows(resolved: Any, value: Value, path: tuple[str, ...]) -> Iterable[Row]:
    if isinstance(resolved, dict) and resolved:
        for key, item in resolved.items():
            yield from _rows(item, value, (*path, key))
        return
    yield Row(".".join(path), _shown(resolved), _row_origin(value, path))


def _row_origin(value: Value, path: tuple[str, ...]) -> str:
    """A short form (`keep: 3`) is the origin of what it stands for."""
    for length in range(len(path), 0, -1):
        found = value.at(path[:length])
        if found is not None and not (isinstance(found.content, dict) and length < len(path)):
            return DEFAULT if found.content is None else found.origin
    return DEFAULT


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if value is None or value == {}:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)

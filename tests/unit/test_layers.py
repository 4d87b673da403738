"""The house: who may import whom, read from the source with ast."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hpc_ckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
GROUND_FLOOR = {
    "errors", "events", "units", "fsio", "rundir", "lease", "ownership", "settings", "resources",
    "testing", "preflight", "parallel", "cores", "processes", "provenance", "making", "policy",
    "format", "tiers",
}  # fmt: skip
RUNTIME_WING = {"state", "engine", "triggers", "runtime", "checkpointer", "integrations"}
CHAIN_WING = {"levels", "chain", "analysis", "cli"}
MAY_IMPORT = {
    "policy": {"units", "errors", "policy"},
    "format": {"fsio", "errors", "rundir", "parallel", "format"},
    "tiers": {"format", "fsio", "errors", "rundir", "settings", "tiers", "events", "units",
              "parallel"},
    "state": {"errors", "format", "state"},
    "engine": {"state", "tiers", "format", "fsio", "errors", "events", "rundir", "lease",
               "settings", "parallel", "cores", "units", "preflight", "provenance", "making",
               "engine"},
    "levels": GROUND_FLOOR | {"levels"},
    "chain": GROUND_FLOOR | {"levels", "chain"},
    "analysis": GROUND_FLOOR | {"analysis", "chain"},
    "cli": GROUND_FLOOR | {"chain", "analysis", "levels", "cli"},
}  # fmt: skip
ONLY_IN = {
    "torch": {"state", "engine", "checkpointer", "integrations"},
    "submitit": {"chain/tasks", "chain/submit"},
    "jinja2": {"chain/render", "analysis/report"},
    "subprocess": {
        "chain/slurm",
        "chain/local",
        "chain/link",
        "chain/step",
        "levels",
        "provenance",
    },
    "typer": {"cli"},
    "rich": {"cli"},
    "pickle": set[str](),
    "cloudpickle": set[str](),
}


def name_of(path: Path) -> str:
    """chain/link for hpc_ckpt/chain/link.py, chain for its __init__."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")


def imports(path: Path) -> set[str]:
    """Absolute dotted names of everything a file imports, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(_from(path, node))
    return found


def _from(path: Path, node: ast.ImportFrom) -> set[str]:
    if node.level == 0:
        return {node.module or ""}
    base = ("hpc_ckpt", *path.relative_to(PACKAGE).parts[:-1])
    base = base[: len(base) - node.level + 1]
    if node.module:
        return {".".join((*base, node.module))}
    return {".".join((*base, alias.name)) for alias in node.names}


def rooms(path: Path) -> set[str]:
    """The rooms of our own house that a file imports."""
    ours = (name.split(".") for name in imports(path) if name.split(".")[0] == "hpc_ckpt")
    return {parts[1] for parts in ours if len(parts) > 1 and parts[1] != "__version__"}


def room(path: Path) -> str:
    return name_of(path).split("/")[0]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_each_room_imports_only_what_it_may(path: Path) -> None:
    """cli → chain → ground floor; checkpointer → engine → state, tiers; no wing the other."""
    here = room(path)
    if here in MAY_IMPORT:
        assert set() == rooms(path) - MAY_IMPORT[here]
    elif here in GROUND_FLOOR:
        assert set() == rooms(path) - GROUND_FLOOR
    elif here in RUNTIME_WING:
        assert set() == rooms(path) - GROUND_FLOOR - RUNTIME_WING
    else:
        assert name_of(path) in {"__init__", "."}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_libraries_stay_in_their_rooms(path: Path) -> None:
    """torch, Slurm's commands, templates and terminals each have one place."""
    where = name_of(path)
    for library, places in ONLY_IN.items():
        if any(where == place or where.startswith(f"{place}/") for place in places):
            continue
        used = {name for name in imports(path) if name.split(".")[0] == library}
        assert set() == used, f"{where} imports {library}"


def test_the_link_runner_reaches_nothing_but_the_standard_library() -> None:
    """Transitively, also through imports inside functions, but for the one of a user's YAML."""
    seen: set[Path] = set()
    foreign: dict[str, set[str]] = {}
    pending = [PACKAGE / "chain" / "link.py"]
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imports(path):
            if name.split(".")[0] == "hpc_ckpt":
                pending.extend(_files(name))
            elif name.split(".")[0] not in sys.stdlib_module_names:
                foreign.setdefault(name_of(path), set()).add(name)
    assert {"settings": {"yaml"}} == foreign
    assert len(seen) > 8


def _files(name: str) -> list[Path]:
    base = PACKAGE.parent.joinpath(*name.split("."))
    candidates = [base.with_suffix(".py"), base / "__init__.py"]
    return [path for path in candidates if path.exists()]


def test_every_room_is_in_the_list() -> None:
    """A new room is put on a floor before it is used."""
    known = GROUND_FLOOR | RUNTIME_WING | CHAIN_WING | {"__init__", "."}
    assert set() == {room(path) for path in MODULES} - known

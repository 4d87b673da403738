"""A stopped chain is taken up again with what its chain.json says: no spec file is needed."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import lease
from ..errors import RootError
from ..rundir import RunDir
from ..settings import ENV_PREFIX
from .complaints import first_complaint
from .directives import without_dependency
from .layers import Loaded
from .plan import Plan
from .planning import make_plan
from .profile import Backend, Profile
from .spec import Spec
from .submit import submit_loaded
from .yamltext import Value, at_path, from_python


def resume_chain(rundir: RunDir, environ: Mapping[str, str]) -> tuple[Plan, list[str]]:
    """The plan and the ids of its new jobs; a live or complete chain is refused."""
    record = rundir.chain()
    if record is None or "spec" not in record or "profile" not in record:
        raise RootError(rundir.root, "no submitted chain there; submit one with a spec")
    if rundir.done() is not None:
        raise RootError(rundir.root, "the work is complete; there is nothing to take up")
    if record.get("sweep"):
        raise RootError(rundir.root, "a member of a sweep: sweeping.resume_members takes it up")
    loaded = recorded(rundir, record)
    cwd = Path(str(record.get("cwd")))
    if not cwd.is_dir():
        raise RootError(rundir.root, f"its working directory {cwd} is not there any more")
    if loaded.profile.backend is Backend.LOCAL:
        raise RootError(
            rundir.root,
            "a chain of this machine: go on with the 'hpc-ckpt run' that began it, or with "
            f"'hpc-ckpt run --root {rundir.root} -- COMMAND'",
        )
    if lease.highest(rundir):
        loaded = _begun(loaded)
    plan = make_plan(loaded, cwd=cwd, environ=environ, live=True)
    return plan, submit_loaded(loaded, plan, environ=environ)


def _begun(loaded: Loaded) -> Loaded:
    """What the first link had to wait for is over, or Slurm has forgotten it."""
    sbatch = without_dependency(loaded.spec.sbatch)
    return replace(loaded, spec=loaded.spec.model_copy(update={"sbatch": sbatch}))


def recorded(rundir: RunDir, record: Mapping[str, Any]) -> Loaded:
    """Spec and profile as they were resolved; no file and no variable of today counts."""
    shown = rundir.chain_file.name
    spec_value = from_python(record["spec"], shown)
    for name, value in (record.get("environment") or {}).items():
        # They outrank the program's own settings in every link, so they stay what they are.
        path = tuple(str(name).removeprefix(ENV_PREFIX).lower().split("__"))
        origin = f"environment variable {name}"
        given = spec_value.at(path)
        kept = str(value) if given is None else given.plain()
        laid = at_path(path, from_python(kept, origin)).over(spec_value)
        spec_value = Value(laid.content, shown)
    profile_value = from_python(record["profile"], shown)
    try:
        spec = Spec.model_validate(spec_value.plain())
        profile = Profile.model_validate(profile_value.plain())
    except ValidationError as error:
        said = _complaint(error, spec_value, profile_value)
        raise RootError(rundir.root, f"its chain.json cannot be used: {said}") from None
    # The root may have been moved since; the record in it says where it was.
    moved = spec.model_copy(update={"root": str(rundir.root)})
    return Loaded(moved, profile, spec_value, profile_value)


def _complaint(error: ValidationError, spec: Value, profile: Value) -> str:
    of_spec = error.title == Spec.__name__
    return first_complaint(error, Spec if of_spec else Profile, spec if of_spec else profile)

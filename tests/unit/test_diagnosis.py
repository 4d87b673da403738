"""What a look around and a trial job mean: each finding, good and bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain.diagnosis import modules_of, place_findings, trial_findings, wanted_of
from hpc_ckpt.chain.findings import Finding, Grade
from hpc_ckpt.chain.probe import Place, Sight
from hpc_ckpt.chain.profile import Profile
from hpc_ckpt.chain.trial import Attempt, Ear, Trial

STEP, BATCH = frozenset({Ear.SHIM}), frozenset({Ear.BATCH})
GOOD = Sight(host="c1", root=Place(path="/w", kind="nfs4", free=1), scontrol="", sbatch="")
HEARD = Attempt("TERM to the step", STEP, STEP, 0.2)


def profile(**keys: Any) -> Profile:
    return Profile.model_validate({"cluster": "lab", **keys})


def ran(**more: Any) -> Trial:
    given = {"job": "7", "host": "c1", "started_after_s": 1.0, "ready": True, "sight": GOOD}
    return Trial(**{**given, "attempts": (HEARD,), **more})


def by_name(trial: Trial, **keys: Any) -> dict[str, Finding]:
    return {finding.what: finding for finding in trial_findings(profile(**keys), trial)}


def test_a_trial_in_which_all_went_well() -> None:
    """One note: sbatch works on nodes, and the profile does not say so."""
    found = by_name(ran())
    notes = [name for name, finding in found.items() if finding.grade is not Grade.OK]
    assert ["sbatch on the node"] == notes
    assert "heard by the shim (0.2 s)" == found["TERM to the step"].seen


@pytest.mark.parametrize(
    ("trial", "grade", "seen"),
    [
        (Trial(refused="invalid account"), Grade.WRONG, "sbatch refused it: invalid account"),
        (Trial(job="7", state="PENDING (Priority)"), Grade.NOTE, "PENDING (Priority)"),
        (Trial(job="7", state="RUNNING (None)"), Grade.WRONG, "nothing it wrote is seen here"),
        (Trial(job="7", state="ENDED", log="no\nsuch file"), Grade.WRONG, "(no such file)"),
        (Trial(job="7"), Grade.NOTE, "the queue did not answer"),
    ],
)
def test_a_trial_that_did_not_start(trial: Trial, grade: Grade, seen: str) -> None:
    """Waiting in the queue is nobody's fault; the rest is."""
    (found,) = trial_findings(profile(), trial)
    assert grade == found.grade
    assert seen in found.seen


def test_a_signal_that_nobody_heard() -> None:
    """A link would not be warned."""
    deaf = Attempt("USR1 to the batch process", BATCH)
    other = Attempt("TERM to the step", STEP, BATCH)
    found = by_name(ran(attempts=(deaf, other)))
    assert "heard by nobody, not by the batch process" == found[deaf.name].seen
    assert "heard by the batch process, not by the shim" == found[other.name].seen
    assert {Grade.WRONG} == {found[one.name].grade for one in (deaf, other)}


def test_a_signal_that_could_not_be_sent_is_a_note() -> None:
    """Nothing is known about it."""
    found = by_name(ran(attempts=(Attempt("the warning", BATCH, problem="no permission"),)))
    assert (Grade.NOTE, "not tried: no permission") == (
        found["the warning"].grade, found["the warning"].seen,
    )  # fmt: skip


def test_signals_that_reach_the_program_too_are_told() -> None:
    """As under linuxproc tracking."""
    loud = Attempt("TERM to the step", STEP, STEP | {Ear.PROGRAM}, 0.2)
    assert Grade.NOTE == by_name(ran(attempts=(loud,)))["signals to the program"].grade


def test_a_node_without_our_interpreter() -> None:
    """No link could start there."""
    found = by_name(ran(sight=None, log="No module named hpc_ckpt"))["interpreter on the node"]
    assert Grade.WRONG == found.grade
    assert "No module named hpc_ckpt" in found.seen


def test_a_step_that_does_not_start() -> None:
    """Nothing can be heard then."""
    found = by_name(ran(ready=False, attempts=()))
    assert Grade.WRONG == found["step of the job"].grade
    assert "signals to the program" not in found


@pytest.mark.parametrize(
    ("said", "problem", "grade"),
    [
        ({"submit_from_compute_nodes": "true"}, "", Grade.OK),
        ({"submit_from_compute_nodes": "true"}, "refused", Grade.WRONG),
        ({"submit_from_compute_nodes": "false"}, "", Grade.NOTE),
        ({"submit_from_compute_nodes": "false"}, "refused", Grade.OK),
        ({"strategy": "resubmit"}, "refused", Grade.WRONG),
    ],
)
def test_sbatch_from_compute_nodes(said: dict[str, str], problem: str, grade: Grade) -> None:
    """What the profile promises must hold; more than that is a note."""
    sight = Sight(host="c1", root=GOOD.root, scontrol="", sbatch=problem)
    assert grade == by_name(ran(sight=sight), chain=said)["sbatch on the node"].grade


def test_scontrol_that_does_not_answer() -> None:
    """Links do not know their end then."""
    sight = Sight(host="c1", root=GOOD.root, scontrol="no answer", sbatch="")
    assert Grade.WRONG == by_name(ran(sight=sight))["scontrol on the node"].grade


def test_modules_that_load_and_that_do_not() -> None:
    """Those of the environment and those of tools, each once."""
    keys = {"environment": {"modules": ["conda"]}, "tools": {"dmtcp": {"module": "dmtcp/3"}}}
    assert ("conda", "dmtcp/3") == modules_of(profile(**keys))
    found = by_name(ran(modules={"conda": True, "dmtcp/3": False}))
    assert (Grade.OK, Grade.WRONG) == (
        found["module conda"].grade, found["module dmtcp/3"].grade,
    )  # fmt: skip


# ── places ────────────────────────────────────────────────────────────────────────────────
STORAGE = {
    "local": {"path": "$TMPDIR", "survives": "process"},
    "shared": {"path": "/scratch", "survives": "node", "purge": "30d"},
}


def sight(root: Place | None = None, **more: Any) -> Sight:
    return Sight(host="login", root=root or Place(path="/w", kind="nfs4", free=1 << 30), **more)


def places(here: Sight, trial: Trial | None = None, **keys: Any) -> dict[str, Finding]:
    found = place_findings(profile(**keys), here, trial, "/home/anna")
    return {finding.what: finding for finding in found}


@pytest.mark.parametrize(
    ("place", "trial", "grade"),
    [
        (Place(path="/w", kind="nfs4"), None, Grade.OK),
        (Place(path="/w", kind="fuse.glusterfs"), None, Grade.OK),
        (Place(path="/w", kind="ext4"), None, Grade.NOTE),
        (Place(path="/w", kind="ext4"), ran(), Grade.OK),
        (Place(path="/w", kind="tmpfs"), ran(), Grade.WRONG),
        (Place(path="/w", problem="cannot be written"), None, Grade.WRONG),
        (Place(path="/home/anna/runs", kind="nfs4"), None, Grade.NOTE),
    ],
)
def test_the_root(place: Place, trial: Trial | None, grade: Grade) -> None:
    """Seen by a node is proof; a kind of file system is a hint."""
    assert grade == places(sight(place), trial)["root"].grade


def test_storage_is_seen_with_the_nodes_eyes() -> None:
    """What is gone with the job cannot be looked at from here."""
    here = sight(storage={"local": Place(path="x", problem="not set"),
                          "shared": Place(path="/scratch", kind="lustre")})  # fmt: skip
    without = places(here, storage=STORAGE)
    assert (Grade.NOTE, Grade.OK) == (
        without["storage local"].grade, without["storage shared"].grade,
    )  # fmt: skip
    assert "untouched for 30d" in without["storage shared"].seen
    node = Sight(host="c1", root=GOOD.root, storage={
        "local": Place(path="/tmp", kind="xfs"), "shared": Place(path="/scratch", problem="gone"),
    })  # fmt: skip
    within = places(here, ran(sight=node), storage=STORAGE)
    assert (Grade.OK, Grade.WRONG) == (
        within["storage local"].grade, within["storage shared"].grade,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "grade"), [("tmpfs", Grade.WRONG), ("ext4", Grade.NOTE)])
def test_storage_that_can_hardly_survive_a_node(kind: str, grade: Grade) -> None:
    """Memory cannot; a plain disk may be the machine's own."""
    here = sight(storage={"shared": Place(path="/scratch", kind=kind)})
    assert grade == places(here, storage={"shared": STORAGE["shared"]})["storage shared"].grade


def test_tools_by_path_and_by_module() -> None:
    """A path is looked at on the node where there is one; a module only there."""
    keys = {"tools": {"criu": {"path": "/opt/criu"}, "dmtcp": {"module": "dmtcp"}}}
    found = places(sight(tools={"criu": "not there"}), **keys)
    assert (Grade.WRONG, Grade.NOTE) == (found["tool criu"].grade, found["tool dmtcp"].grade)
    node = Sight(host="c1", root=GOOD.root, tools={"criu": ""})
    assert Grade.OK == places(sight(), ran(sight=node), **keys)["tool criu"].grade
    assert {"criu": "/opt/criu"} == wanted_of(profile(**keys), Path("/w"), slurm=True).tools

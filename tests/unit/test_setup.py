"""One node on which no environment can be made ends neither a chain nor the members of a sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from links import chain_record, make_chain
from sweeps import make_sweep

from hpc_ckpt.chain import link, setup, slurm
from hpc_ckpt.chain.allocation import SlurmBackend
from hpc_ckpt.chain.budget import links_left
from hpc_ckpt.chain.orders import Orders
from hpc_ckpt.chain.patience import ToldToStop
from hpc_ckpt.errors import EXIT_COMPLETE, EXIT_FAILED
from hpc_ckpt.events import Event
from hpc_ckpt.rundir import RunDir

ALIKE = "".join(f"n{number}|idle|gpu:a100:4|ib\n" for number in (1, 2, 3))
ALONE = "n1|idle|gpu:a100:4|ib\nn2|down*|gpu:a100:4|ib\nn3|idle|(null)|ib\n"


class Site:
    """Answers sinfo, and scontrol of the job; remembers the rest."""

    def __init__(self, nodes: str, record: str = "") -> None:
        self.nodes, self.record = nodes, record
        self.asked: list[list[str]] = []

    def __call__(self, argv: Sequence[str]) -> str:
        self.asked.append(list(argv))
        if argv[:3] == ["scontrol", "-o", "show"]:
            return self.record
        return self.nodes if argv[0] == "sinfo" else ""

    def of(self, verb: str) -> list[list[str]]:
        return [argv[2:] for argv in self.asked if argv[:2] == ["scontrol", verb]]


MORE: dict[str, Any] = {"strategy": "requeue", "spec": {"exclude": ["n9"]}}


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited; no time passes."""
    waited: list[float] = []
    monkeypatch.setattr(setup, "sleep_unless_told", waited.append)
    return waited


@pytest.fixture
def chain(tmp_path: Path) -> RunDir:
    return make_chain(tmp_path / "run", **MORE)


@pytest.fixture
def sweep(tmp_path: Path) -> list[RunDir]:
    made = make_sweep(tmp_path, 4)
    for place in made:
        told = {**json.loads(place.chain_file.read_text()), **chain_record(**MORE)}
        place.chain_file.write_text(json.dumps(told))
    return made


def backend(site: Site, node: str, index: int | None = None) -> SlurmBackend:
    environ = {"SLURMD_NODENAME": node, "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_ID": "20"}
    if index is not None:
        environ |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
    return SlurmBackend(environ, run=site)


def fails(place: RunDir, site: Site, node: str, index: int | None = None) -> str | None:
    """Why the chain is over after its set-up failed there, if it is."""
    runner = link.LinkRunner(place, Orders.read(place), backend(site, node, index))
    assert EXIT_FAILED == runner.not_set_up(f"module load x failed on {node}")
    return place.halted()


def works(place: RunDir, node: str) -> None:
    setup.worked(Orders.read(place), node)


# ── a chain ───────────────────────────────────────────────────────────────────────────────
def test_the_first_failure_goes_on_elsewhere(chain: RunDir) -> None:
    """Put back into the queue, but not for this node; no link is used up."""
    site = Site(ALIKE)
    assert fails(chain, site, "n1") is None
    assert [["20"]] == site.of("requeue")
    assert [["jobid=20", "ExcNodeList=n9,n1"]] == site.of("update")
    assert [] == list(chain.lease.iterdir())


def test_a_set_up_that_fails_uses_up_a_token_and_no_link(tmp_path: Path) -> None:
    """Of an array: the next index goes on, and the budget is as it was."""
    place = make_chain(tmp_path / "run", strategy="array", jobs=["7"])
    site = Site(ALIKE)
    assert fails(place, site, "n1", 1) is None
    assert [] == site.of("requeue")
    assert 9 == links_left(place, 1, Orders.read(place))


def test_a_hiccup_does_not_use_up_all_tries(chain: RunDir, pauses: list[float]) -> None:
    """A while passes before the next try; where there is none nothing is waited for."""
    site = Site(ALONE)
    fails(chain, site, "n1")
    assert [setup.PAUSE_S] == pauses
    assert fails(chain, site, "n1") is not None
    assert [setup.PAUSE_S] == pauses


@pytest.mark.parametrize(("state", "goes_on"), [("RUNNING", True), ("CANCELLED", False)])
def test_a_link_that_is_told_to_stop_in_the_pause(
    chain: RunDir, monkeypatch: pytest.MonkeyPatch, state: str, goes_on: bool
) -> None:
    """It goes on at once, unless somebody has cancelled it."""

    def told(seconds: float) -> None:
        raise ToldToStop

    monkeypatch.setattr(setup, "sleep_unless_told", told)
    site = Site(ALIKE, f"JobId=20 JobName=x UserId=u(1) JobState={state} ExcNodeList=n9\n")
    assert goes_on == (fails(chain, site, "n1") is None)
    assert goes_on == bool(site.of("requeue"))


def test_a_chain_that_is_stopped_in_the_pause_does_not_go_on(
    chain: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "sleep_unless_told", lambda _: chain.write_halt("by the user"))
    site = Site(ALIKE)
    assert "by the user" == fails(chain, site, "n1")
    assert [] == site.of("requeue")


def test_two_nodes_on_which_it_fails_are_no_accident(chain: RunDir) -> None:
    site = Site(ALIKE)
    fails(chain, site, "n1")
    assert "module load x failed on n2" == fails(chain, site, "n2")
    assert 1 == len(site.of("requeue"))
    again = link.LinkRunner(chain, Orders.read(chain), backend(site, "n3"))
    assert EXIT_COMPLETE == again.not_set_up("whatever")


def test_where_no_other_node_would_do_none_is_excluded(chain: RunDir) -> None:
    """One that is down, or has no such GPUs, does not count."""
    site = Site(ALONE)
    assert fails(chain, site, "n1") is None
    assert [] == site.of("update")
    assert fails(chain, site, "n1") is not None


@pytest.mark.parametrize(
    ("excluded", "told"),
    [(["n2", "n3"], []), (["n[2-3]"], []), (["n[3-9]"], ["jobid=20", "ExcNodeList=n[3-9],n1"])],
)
def test_a_node_that_its_user_excluded_would_not_do(
    tmp_path: Path, excluded: list[str], told: list[str]
) -> None:
    """Else the last one that is left would be excluded, and the chain would wait for ever."""
    place = make_chain(tmp_path / "run", strategy="requeue", spec={"exclude": excluded})
    site = Site(ALIKE)
    assert fails(place, site, "n1") is None
    assert ([told] if told else []) == site.of("update")


@pytest.mark.parametrize(
    ("extra", "sbatch", "told"),
    [
        ([], ["--exclude=n3,n4"], "n3,n4,n1"),
        ([], ["-x n[3-4]"], "n[3-4],n1"),
        (["--exclude=n3"], [], "n3,n1"),
        (["--exclude=n3"], ["--comment=x -x n4"], "n4,n1"),
        ([], ["--exclude=./hosts"], "n3,n4,n1"),
        ([], ["--exclude=./gone"], "n1"),
    ],
)
def test_what_is_excluded_by_a_directive_stays_so(
    tmp_path: Path, extra: list[str], sbatch: list[str], told: str
) -> None:
    """Slurm replaces ExcNodeList as a whole; of directives the last word counts, as for sbatch."""
    (tmp_path / "hosts").write_text("n3 # broken\nn4\n")
    profile = {**chain_record()["profile"], "directives": {"extra": extra}}
    spec = {"exclude": ["n9"], "sbatch": sbatch}
    place = make_chain(
        tmp_path / "run", strategy="requeue", cwd=str(tmp_path), spec=spec, profile=profile
    )
    site = Site(ALIKE)
    assert fails(place, site, "n1") is None
    assert [["jobid=20", f"ExcNodeList={told}"]] == site.of("update")


def test_a_host_excluded_for_its_failures_would_not_do(chain: RunDir) -> None:
    (chain.lease / "00000001").write_text("{}")
    excluded = {"time": 1.0, "event": Event.HOSTS_EXCLUDED.value, "hosts": ["n2", "n3"]}
    chain.ledger_file(1).write_text(json.dumps(excluded) + "\n")
    site = Site(ALIKE)
    assert fails(chain, site, "n1") is None
    assert [] == site.of("update")


@pytest.mark.parametrize(
    ("wanted", "left"),
    [("ReqNodeList=n[1-2]", False), ("Reservation=course", False), ("ReqNodeList=(null)", True)],
)
def test_nodes_that_were_asked_for_by_name_are_not_excluded(
    chain: RunDir, wanted: str, left: bool
) -> None:
    """Others of the partition are none of this job's."""
    site = Site(ALIKE, f"JobId=20 JobName=x UserId=u(1) {wanted} ExcNodeList=n9\n")
    assert fails(chain, site, "n1") is None
    assert left == bool(site.of("update"))
    assert left == bool(setup.bad_nodes(Orders.read(chain)))


def test_where_it_worked_before_it_is_the_nodes(chain: RunDir) -> None:
    """Several of them are passed over, one after the other; a success forgets them."""
    site = Site(ALIKE)
    works(chain, "n3")
    for node in ("n1", "n2", "n1", "n2"):
        assert fails(chain, site, node) is None
    works(chain, "n3")
    for node in ("n1", "n2", "n1", "n2"):
        assert fails(chain, site, node) is None
    assert fails(chain, site, "n1") is not None


def test_a_runner_that_starts_counts_nodes_without_one_anew(
    chain: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty in all the months of a chain are no reason to end it."""
    (chain.logs / "setup-failed-no-runner").write_text("x\n" * 20)
    monkeypatch.setattr(link.LinkRunner, "run", lambda _: EXIT_COMPLETE)
    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: set())
    assert EXIT_COMPLETE == link.main(["--root", str(chain.root), "--backend", "local"])
    assert not (chain.logs / "setup-failed-no-runner").exists()


def test_a_node_without_a_runner_is_no_failure_of_the_set_up(chain: RunDir) -> None:
    """No link goes there, but the first failure elsewhere still goes on."""
    (chain.logs / "no-runner-nodes").write_text("n1\n")
    assert ["n1"] == setup.bad_nodes(Orders.read(chain))
    site = Site(ALIKE)
    assert fails(chain, site, "n2") is None
    assert [["jobid=20", "ExcNodeList=n9,n1,n2"]] == site.of("update")


@pytest.mark.parametrize(("nodes", "kept"), [("n1\n", ["n1"]), ("n1\nn2\n", [])])
def test_several_nodes_without_a_runner_were_the_environment(
    chain: RunDir, nodes: str, kept: list[str]
) -> None:
    """pip was at work in it: now that the runner starts, they will do as well."""
    (chain.logs / "no-runner-nodes").write_text(nodes)
    setup.started(Orders.read(chain))
    assert kept == setup.bad_nodes(Orders.read(chain))


def test_it_worked_once_on_the_very_node_that_fails_now(chain: RunDir) -> None:
    """That says nothing of others."""
    works(chain, "n1")
    site = Site(ALONE)
    fails(chain, site, "n1")
    assert fails(chain, site, "n1") is not None


TWO = "".join(f"n{number}|idle|gpu:a100:4|ib\n" for number in (1, 2))


def test_a_hiccup_on_the_only_node_that_is_left_does_not_end_a_chain(
    chain: RunDir, pauses: list[float]
) -> None:
    """It has worked there: that it failed on another says nothing of this one."""
    site = Site(TWO)
    assert fails(chain, site, "n1") is None
    works(chain, "n2")
    assert fails(chain, site, "n2") is None
    assert [setup.PAUSE_S] * 2 == pauses
    works(chain, "n2")
    assert fails(chain, site, "n2") is None
    assert "module load x failed on n2" == fails(chain, site, "n2")


def test_where_it_worked_but_fails_by_turns_it_ends_too(chain: RunDir) -> None:
    site = Site(TWO)
    works(chain, "n2")
    for node in ("n2", "n1", "n2", "n1"):
        assert fails(chain, site, node) is None
    assert fails(chain, site, "n2") is not None


def test_a_new_submission_gives_every_node_a_chance(chain: RunDir) -> None:
    fails(chain, Site(ALIKE), "n1")
    assert ["n1"] == setup.bad_nodes(Orders.read(chain))
    (chain.logs / "no-runner-nodes").write_text("n2\n")
    setup.forget(chain.logs)
    assert [] == [path for path in chain.logs.iterdir() if path.name.startswith(("setup-", "no-"))]


# ── a sweep ───────────────────────────────────────────────────────────────────────────────
def test_a_bad_node_is_excluded_for_all_members(sweep: list[RunDir]) -> None:
    """One call for those that have not begun; each that met it is put back, and none is over."""
    site = Site(ALIKE)
    for index, member in enumerate(sweep[:3], 1):
        assert fails(member, site, "n1", index) is None
    assert ["7_1", "7_2", "7_3"] == [words[0] for words in site.of("requeue")]
    told = site.of("update")
    assert ["jobid=7", "ExcNodeList=n9,n1"] == told[0]
    assert 1 == sum(words[0] == "jobid=7" for words in told)
    own = [words for words in told if words[0] != "jobid=7"]
    assert [[f"jobid=7_{n}", "ExcNodeList=n9,n1"] for n in (1, 2, 3)] == own


def test_a_broken_set_up_ends_members_by_what_the_others_saw(sweep: list[RunDir]) -> None:
    """A thousand members do not try two nodes each."""
    site = Site(ALIKE)
    assert fails(sweep[0], site, "n1", 1) is None
    assert fails(sweep[1], site, "n2", 2) is not None
    assert fails(sweep[2], site, "n1", 3) is None
    assert fails(sweep[2], site, "n3", 3) is not None


def test_what_worked_for_one_member_works_for_all(sweep: list[RunDir]) -> None:
    site = Site(ALIKE)
    works(sweep[0], "n3")
    for node in ("n1", "n2"):
        for index, member in enumerate(sweep[1:], 2):
            assert fails(member, site, node, index) is None


def test_nodes_that_are_alike() -> None:
    """The same GPUs and features, and able to take a job."""
    assert ["n2", "n3"] == slurm.nodes_like("n1", ALIKE)
    assert [] == slurm.nodes_like("n1", ALONE)
    assert [] == slurm.nodes_like("n1", "")

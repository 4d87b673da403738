"""Planning: how many links, how long, with which directives, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt import __version__, settings
from hpc_ckpt.chain.activation import Activation, Kind, active
from hpc_ckpt.chain.directives import dependency_of
from hpc_ckpt.chain.layers import Loaded
from hpc_ckpt.chain.plan import Plan, plan_chain
from hpc_ckpt.chain.profile import Profile, Strategy
from hpc_ckpt.chain.record import chain_record
from hpc_ckpt.chain.spec import Spec
from hpc_ckpt.chain.strategy import MOST_JOBS
from hpc_ckpt.chain.submit import pin
from hpc_ckpt.chain.survey import Bound, LiveLimits
from hpc_ckpt.chain.yamltext import from_python
from hpc_ckpt.errors import SpecError
from hpc_ckpt.levels.choice import Choice
from hpc_ckpt.tiers.wishes import Survives, TierWish

CWD = Path("/home/u/project")
VENV = Activation(Kind.VENV, "/home/u/venv")
LAB: dict[str, Any] = {
    "cluster": "lab",
    "partitions": {
        "gpu": {"max_time": "8h", "gpus": ["a100"]},
        "cpu": {"max_time": "2h", "gpus": []},
        "low": {"max_time": "24h", "preempt": {"mode": "requeue", "grace": "120s"}},
    },
}
LOCAL = {"cluster": "local", "backend": "local", "signal": {"lead": "0s"}}


def both(profile: dict[str, Any], **keys: Any) -> tuple[Spec, Profile]:
    spec = Spec.model_validate({"command": "python train.py", "root": "/runs/train", **keys})
    return spec, Profile.model_validate(profile)


def plan(profile: dict[str, Any] = LAB, /, **keys: Any) -> Plan:
    return plan_chain(*both(profile, **keys), cwd=CWD, activations=[VENV])


def refusal(profile: dict[str, Any] = LAB, /, **keys: Any) -> str:
    with pytest.raises(SpecError) as caught:
        plan(profile, **keys)
    return str(caught.value)


def directives(made: Plan) -> dict[str, str | None]:
    return {directive.name: directive.value for directive in made.directives}


# ── how long ──────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("profile", "partition", "expected_h"),
    [
        (LAB, "gpu", 8),
        (LAB, "low", 8),
        (LAB, "gpu,cpu", 2),
        (LAB, "", 8),
        ({"cluster": "unknown"}, "any", 8),
        (LOCAL, "gpu", 1),
    ],
)
def test_a_link_is_as_long_as_its_partition_allows(
    profile: dict[str, Any], partition: str, expected_h: float
) -> None:
    """The tightest of several partitions counts; no default is longer than 8 hours."""
    assert expected_h * 3600 == plan(profile, partition=partition).link_s


def test_a_link_longer_than_the_partition_allows_is_refused() -> None:
    """Slurm would leave it pending for ever; both times are said."""
    expected = "chain.link_time: 10h is more than partition 'gpu' allows (8h)"
    assert expected == refusal(partition="low,gpu", chain={"link_time": "10h"})
    assert 8 * 3600 == plan(partition="gpu", chain={"link_time": "8:00:00"}).link_s


def test_a_link_hardly_longer_than_its_warning_is_refused() -> None:
    """2 × (lead + 60 s): shorter ones are warned as they start. The smallest that works is said."""
    said = refusal(chain={"link_time": "479s"})
    assert "7m 59s is too short for a warning 180s before the end; at least 8m" in said
    assert 480 == plan(chain={"link_time": "8 min"}).link_s


def test_a_local_link_may_be_of_any_length() -> None:
    """No scheduler rounds or warns early there."""
    assert 0.5 == plan(LOCAL, chain={"link_time": "500ms"}).link_s


# ── how many ──────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("partition", "chain", "expected"),
    [
        ("gpu", {}, 10),
        ("gpu", {"max_links": 1}, 1),
        ("gpu", {"total_time": "1h"}, 2),
        ("gpu", {"total_time": "72h"}, 11),
        ("gpu", {"total_time": "72h", "max_links": 40}, 11),
        ("gpu", {"total_time": "72h", "max_links": 4}, 4),
        ("gpu,low", {"total_time": "72h", "max_links": 40}, 20),
        ("gpu", {"total_time": "10000 weeks"}, 1000),
    ],
)
def test_links_are_what_the_work_needs_and_some_to_spare(
    partition: str, chain: dict[str, Any], expected: int
) -> None:
    """ceil(total / (link − lead − 60 s)), a tenth more, twice as many where links are preempted."""
    made = plan(partition=partition, chain=chain)
    assert (expected, f"1-{expected}%1") == (made.links, made.array)


@pytest.mark.parametrize(
    ("chain", "budget", "said"),
    [
        ({"total_time": "72h"}, 11, "at most 11 of 8h each (3d 16h), one at a time"),
        (
            {"total_time": "72h", "max_links": 40},
            40,
            "11 of 8h each for the work, at most 40 (13d 8h), one at a time",
        ),
        (
            {"total_time": "72h", "max_links": 4},
            4,
            "at most 4 of 8h each (1d 8h), one at a time",
        ),
        ({"max_links": 40}, 40, "at most 40 of 8h each (13d 8h), one at a time"),
    ],
)
def test_the_budget_is_what_the_user_allows(chain: dict[str, Any], budget: int, said: str) -> None:
    """The plan says what is enforced: a chain may need more links than were planned."""
    spec, profile = both(LAB, partition="gpu", chain=chain)
    made = plan_chain(spec, profile, cwd=CWD)
    record = chain_record(spec, profile, made, chain="x", created=0.0)
    assert (budget, budget) == (made.budget, record["spec"]["chain"]["max_links"])
    assert f"links     {said}" in made.describe()


def test_a_local_chain_loses_no_time_to_warnings() -> None:
    """Ten hours in links of one hour are ten links and one to spare."""
    assert 11 == plan(LOCAL, chain={"total_time": "10h"}).links


def test_too_few_links_for_the_work_are_noted() -> None:
    """The user's limit is kept, and its consequence said."""
    notes = plan(partition="gpu", chain={"total_time": "72h", "max_links": 4}).notes
    assert ("4 links give 1d 7h 44m of work, less than total_time; submit again then",) == notes


# ── where ─────────────────────────────────────────────────────────────────────────────────
def test_an_unknown_partition_is_refused_with_the_known_ones() -> None:
    """And with the place where one can be added; a profile that lists none knows none."""
    said = refusal(partition="gpuu")
    assert "knows no partition 'gpuu'; known: cpu, gpu, low." in said
    assert said.endswith("~/.config/hpc_ckpt/clusters/lab.yaml")
    assert "any" == directives(plan({"cluster": "unknown"}, partition="any"))["--partition"]


def test_gpus_that_a_partition_does_not_have_are_refused() -> None:
    """Where the profile says which there are."""
    assert "resources.gpus: partition 'cpu' has no GPUs" == refusal(
        partition="cpu", resources={"gpus": 1}
    )
    assert "resources.gpus: partition 'gpu' has no 'h100' GPUs; known: a100" == refusal(
        partition="gpu", resources={"gpus": "h100:1"}
    )
    assert "gpu:h100:2" == directives(plan(partition="low", resources={"gpus": "h100:2"}))["--gres"]


# ── directives ────────────────────────────────────────────────────────────────────────────
def test_the_directives_of_a_plain_chain() -> None:
    """The verified shape; what was not asked for is left to Slurm."""
    expected = {
        "--job-name": "train",
        "--array": "1-10%1",
        "--time": "08:00:00",
        "--nodes": "1",
        "--ntasks": "1",
        "--cpus-per-task": "1",
        "--signal": "B:USR1@180",
        "--open-mode": "append",
        "--output": "/runs/train/logs/slurm-%A_%a.log",
        "--export": "NONE",
        "--chdir": "/home/u/project",
        "--requeue": None,
    }
    assert expected == directives(plan({"cluster": "unknown"}))


def test_what_was_asked_for_becomes_a_directive() -> None:
    """Names and units as Slurm wants them."""
    made = directives(
        plan(
            partition="gpu,low",
            account="lab",
            qos="high",
            constraint="ib&cascadelake",
            resources={"gpus": 2, "cpus": 8, "memory": "32G"},
            chain={"link_time": "90 min"},
        )
    )
    assert ("gpu,low", "lab", "high", "ib&cascadelake", "gpu:2", "8", "32768M", "01:30:00") == (
        *(made[f"--{n}"] for n in ("partition", "account", "qos", "constraint", "gres")),
        *(made[f"--{n}"] for n in ("cpus-per-task", "mem", "time")),
    )


def test_memory_zero_means_all_of_the_node() -> None:
    """Slurm's own meaning of --mem=0."""
    assert "0" == directives(plan(resources={"memory": "0"}))["--mem"]


def test_a_profile_adds_skips_and_forbids_requeueing() -> None:
    """extra is written as it is, skip leaves ours out, requeue: false says so to Slurm."""
    site = {"extra": ["--comment='a b'"], "skip": ["--mem", "--chdir"]}
    made = plan(
        {**LAB, "directives": site, "chain": {"requeue": False}}, resources={"memory": "1G"}
    )
    names = set(directives(made))
    assert (("--comment='a b'",), False, False, True, False) == (
        made.extra,
        "--mem" in names,
        "--chdir" in names,
        "--no-requeue" in names,
        "--requeue" in names,
    )


def test_percent_signs_of_a_root_are_not_slurms() -> None:
    """Slurm expands % in a log's name; a backslash there cannot be written at all."""
    assert "/r/50%%/logs/slurm-%A_%a.log" == directives(plan(root="/r/50%"))["--output"]
    assert "contains a backslash" in refusal(root="/r/a\\b")
    assert Path("/r/a\\b") == plan(LOCAL, root="/r/a\\b").root


def test_the_local_runner_has_no_directives_and_no_set_up() -> None:
    """It runs in the environment of the submission itself."""
    made = plan(LOCAL)
    assert ((), (), ()) == (made.directives, made.modules, made.activations)


# ── set-up ────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("environment", "activations", "said"),
    [
        ({"prologue": "conda activate x\n"}, [VENV], "the prologue of lab makes the environment"),
        ({"modules": ["cuda"]}, [], "no virtual or conda environment is active"),
    ],
)
def test_packages_that_cannot_be_compared_are_not_pinned_in_silence(
    tmp_path: Path, environment: dict[str, Any], activations: list[Activation], said: str
) -> None:
    """A link in a changed environment would start all the same."""
    spec, profile = both({**LAB, "environment": environment}, pin={"environment": True})
    nothing = from_python({}, "test")
    made = plan_chain(spec, profile, cwd=tmp_path, activations=activations)
    with pytest.raises(SpecError, match=said):
        pin(Loaded(spec, profile, nothing, nothing), made, tmp_path)


def test_a_prologue_replaces_the_activation_and_modules_do_not() -> None:
    """Whoever writes a prologue activates there; modules are only loaded first."""
    modules = plan({**LAB, "environment": {"modules": ["cuda"]}})
    prologue = plan({**LAB, "environment": {"prologue": "conda activate x\n"}})
    assert (("cuda",), (VENV,)) == (modules.modules, modules.activations)
    assert ("conda activate x", ()) == (prologue.prologue, prologue.activations)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ()),
        ({"VIRTUAL_ENV": "/v"}, (Activation(Kind.VENV, "/v"),)),
        ({"CONDA_PREFIX": "/c", "CONDA_EXE": "/x/conda"},
         (Activation(Kind.CONDA, "/c", "/x/conda"),)),
        ({"CONDA_PREFIX": "/c", "MAMBA_EXE": "/x/mm"},
         (Activation(Kind.MICROMAMBA, "/c", "/x/mm"),)),
        ({"CONDA_PREFIX": "/c", "VIRTUAL_ENV": "/v"},
         (Activation(Kind.PREFIX, "/c"), Activation(Kind.VENV, "/v"))),
    ],
)  # fmt: skip
def test_the_active_environment_is_recognised(
    environ: dict[str, str], expected: tuple[Activation, ...]
) -> None:
    """Conda first: a virtual environment lies on top of it."""
    assert expected == active(environ, exists=lambda path: path == "/v/bin/activate")


def test_a_stale_virtual_environment_is_found_at_submission() -> None:
    """Not hours later, on the node."""
    with pytest.raises(SpecError, match="VIRTUAL_ENV: /gone has no bin/activate"):
        active({"VIRTUAL_ENV": "/gone"}, exists=lambda path: False)


# ── words ─────────────────────────────────────────────────────────────────────────────────
def test_a_plan_can_be_read() -> None:
    """What is submitted, how long, how often it saves, what it keeps, where, at which level."""
    made = plan(
        partition="gpu,low",
        chain={"total_time": "72h", "max_links": 40},
        checkpoint={"keep": {"every": 1000, "best": "accuracy"}},
    )
    expected = [
        "chain     train on lab, partition gpu,low",
        "root      /runs/train",
        "links     20 of 8h each for the work, at most 40 (13d 8h), one at a time",
        "work      3d asked for",
        "level     model: the command is expected to use hpc_ckpt.Checkpointer,"
        " or to exit 75 when saved",
        "policy    auto, which means every 10 min in this version",
        "keep      the newest 3, every 1000th step, the best by accuracy (max)",
        "set-up    activate /home/u/venv",
        "note      20 links are submitted now; this site lets no compute node submit more "
        "(chain.submit_from_compute_nodes): further ones take 'hpc-ckpt resume', which counts the "
        "40 anew",
        "note      links on low can be preempted (requeue, 120s to save)",
    ]
    assert expected == made.describe()


STORAGE: dict[str, Any] = {
    "local": {"path": "$TMPDIR", "survives": "process"},
    "shared": {"path": "/scratch/$USER/hpc_ckpt", "survives": "node", "quota": "1T"},
}


def test_a_plan_says_where_checkpoints_go() -> None:
    """Only where there is a choice; what goes with the job is said to."""
    made = plan({**LAB, "storage": STORAGE}, tiers=["local", "shared", "/x y"])
    expected = (
        "tiers     local ($TMPDIR; gone with the job), then shared (/scratch/$USER/hpc_ckpt), "
        "then /x y, then root"
    )
    assert expected in made.describe()
    assert not [line for line in plan(LAB).describe() if line.startswith("tiers")]


def test_the_home_is_where_the_list_names_it() -> None:
    """Last, unless somebody wants it elsewhere."""
    made = plan({**LAB, "storage": STORAGE}, tiers=["root", "shared"])
    assert ("root", "shared (/scratch/$USER/hpc_ckpt)") == made.tiers


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        (["locl"], "no storage is named 'locl'. Did you mean 'local'? "
                   "A directory is written with a slash: './locl'"),
        (["zzz"], "no storage is named 'zzz'. Known: local, root, shared. "
                  "A directory is written with a slash: './zzz'"),
        (["$TMPDIR"], "'$TMPDIR' is no name, and a directory is written with a slash: '$TMPDIR/'"),
    ],
)  # fmt: skip
def test_a_tier_nobody_knows_is_refused_with_the_nearest(tiers: list[str], expected: str) -> None:
    """At submission: only spec and profile together know the names."""
    said = refusal({**LAB, "storage": STORAGE}, tiers=tiers)
    assert f"tiers: the profile of lab: {expected}" == said


def test_a_local_plan_says_what_it_does_not_use() -> None:
    """The same spec runs on both; nobody should think the partition counts here."""
    lines = plan(LOCAL, partition="gpu").describe()
    assert "chain     train on this machine (no Slurm)" == lines[0]
    assert "note      partition is not used on this machine" == lines[-1]


# ── strategies and limits ─────────────────────────────────────────────────────────────────
def limited(site: dict[str, object], limits: LiveLimits, **keys: object) -> Plan:
    spec, profile = both({**LAB, **site}, partition="gpu", **keys)
    return plan_chain(spec, profile, cwd=CWD, limits=limits)


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("site", [{}, {"chain": {"strategy": "array"}}])
def test_where_arrays_are_off_jobs_wait_for_each_other(most: int, site: dict[str, object]) -> None:
    """Slurm's MaxArraySize is one more than the highest index."""
    made = limited(site, LiveLimits(most), chain={"max_links": 10})
    assert (Strategy.AFTERANY, None, 10) == (made.strategy, made.array, made.links)
    assert not any("links at once" in note for note in made.notes)


def test_an_array_that_was_asked_for_is_not_replaced_in_silence() -> None:
    with pytest.raises(SpecError, match=r"takes no job arrays \(MaxArraySize\)"):
        limited({}, LiveLimits(0), chain={"strategy": "array"})
    with pytest.raises(SpecError, match=r"2 are more than this site takes in one array \(0\)"):
        limited({}, LiveLimits(0), members={"x": [1, 2]})


def test_an_array_is_no_larger_than_the_site_takes() -> None:
    """What does not fit follows, or has to be submitted again: the plan says which."""
    made = limited({}, LiveLimits(5), chain={"max_links": 40})
    assert (4, "1-4%1") == (made.links, made.array)
    assert "this site takes 4 links at once instead of 40; submit again" in made.notes[0]
    made = limited({}, LiveLimits(None, Bound(3, "the site")), chain={"max_links": 40})
    assert 3 == made.links
    site = {"chain": {"submit_from_compute_nodes": True}, "limits": {"max_array": 3}}
    made = limited(site, LiveLimits(5), chain={"max_links": 40})
    assert 2 == made.links
    assert "the chain extends itself" in made.notes[0]


EXTENDS: dict[str, object] = {"chain": {"submit_from_compute_nodes": True}}


def test_a_chain_that_extends_itself_leaves_room_for_the_link_that_does() -> None:
    """It is in the queue itself when it submits the next ones."""
    made = limited(EXTENDS, LiveLimits(None, Bound(7, "QoS 'few'")), chain={"max_links": 40})
    assert (6, "1-6%1") == (made.links, made.array)
    assert "6 links at once instead of 40: QoS 'few'; the chain extends itself" in made.notes[0]
    enough = limited(EXTENDS, LiveLimits(None, Bound(7, "QoS 'few'")), chain={"max_links": 7})
    assert (7, False) == (enough.links, any("at once" in note for note in enough.notes))
    key = {"chain": {"strategy": "resubmit"}}
    alone = limited(EXTENDS, LiveLimits(None, Bound(1, "QoS 'few'")), **key)
    assert "successor waits until there is room in the queue: QoS 'few'" in alone.notes[0]


@pytest.mark.parametrize(
    ("live", "keys", "said"),
    [
        (LiveLimits(submit=Bound(0, "full")), {}, "no job can be submitted now: full; wait"),
        (
            LiveLimits(submit=Bound(2, "little room")),
            {"members": {"x": [1, 2, 3]}},
            "3 are more than this site takes at once (2: little room)",
        ),
        (
            LiveLimits(wall=Bound(3600, "account 'lab'")),
            {"chain": {"link_time": "2h"}},
            "chain.link_time: 2h is more than account 'lab' allows (1h)",
        ),
        (LiveLimits(running=Bound(0, "QoS 'no'")), {}, "no link could ever start: QoS 'no'"),
    ],
)
def test_what_could_not_be_submitted_or_start_is_refused(
    live: LiveLimits, keys: dict[str, object], said: str
) -> None:
    with pytest.raises(SpecError) as caught:
        limited({}, live, **keys)
    assert said in str(caught.value)


def test_only_members_that_would_be_submitted_must_fit() -> None:
    """Those that are complete are not; an array is bounded by its highest index all the same."""
    spec, profile = both(LAB, partition="gpu", members={"x": [1, 2, 3, 4]}, parallel=3)

    def planned(live: LiveLimits, *complete: str) -> Plan:
        return plan_chain(spec, profile, cwd=CWD, limits=live, complete=complete)

    room = LiveLimits(submit=Bound(2, "QoS 'few'"), running=Bound(2, "QoS 'few'"))
    made = planned(room, "x-1", "x-3")
    assert "members   4, each a chain of its own; 2 are complete and left alone" in made.describe()
    assert not any("running jobs" in note for note in made.notes)
    with pytest.raises(SpecError, match="3 are more than this site takes at once"):
        planned(room, "x-1")
    with pytest.raises(SpecError, match="4 are more than this site takes in one array"):
        planned(LiveLimits(4), "x-1", "x-2", "x-3")
    planned(LiveLimits(4), "x-4")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["--licenses=a"], None),
        (["--dependency=afterok:1"], "afterok:1"),
        (["--dependency afterok:1", "--depend='afterany:2?afterok:3'"], "afterany:2?afterok:3"),
        (["--licenses=a --dependency=singleton"], "singleton"),
        (["--deadline=now", "--comment=--dependent=3", "--kill-on-invalid-dep=yes"], None),
    ],
)
def test_what_a_job_waits_for_is_read_as_sbatch_does(
    lines: list[str], expected: str | None
) -> None:
    assert expected == dependency_of(lines)


def test_a_dependency_of_the_user_is_explained() -> None:
    """sbatch takes one: that of the command line, by which links follow each other."""
    made = limited({}, LiveLimits(), sbatch=["--dependency=afterok:12"])
    (said,) = (note for note in made.notes if "--dependency=afterok:12" in note)
    assert "for the first link; those after it wait for the link before" in said
    assert not any("dependency" in note for note in limited({}, LiveLimits()).notes)


def test_links_are_no_longer_than_an_account_allows() -> None:
    """Where the spec does not say how long they are."""
    assert 3600.0 == limited({}, LiveLimits(wall=Bound(3600, "account 'lab'"))).link_s
    few = LiveLimits(running=Bound(2, "account 'lab'"))
    made = limited({}, few, members={"x": [1, 2, 3]})
    assert "account 'lab' allows 2 running jobs" in made.notes


@pytest.mark.parametrize("strategy", ["requeue", "afterany", "resubmit"])
def test_other_strategies_are_no_array(strategy: str) -> None:
    site = {"chain": {"submit_from_compute_nodes": True}}
    made = limited(site, LiveLimits(), chain={"strategy": strategy})
    assert (None, strategy) == (made.array, made.strategy.value)
    written = {directive.name: directive.value for directive in made.directives}
    assert "--array" not in written
    assert str(written["--output"]).endswith("/logs/slurm-%j.log")


OWN_FILES = Choice(({"name": "gromacs"},), "gromacs", "by its recipe")
PLAIN = Choice((), "plain", "nothing else fits")


@pytest.mark.parametrize("level", [OWN_FILES, PLAIN])
def test_programs_that_write_files_of_their_own_never_overlap(level: Choice) -> None:
    """No lease keeps two of them apart: each link is a job that waits until the last is gone."""
    spec, profile = both(LAB, partition="gpu", chain={"max_links": 4})
    made = plan_chain(spec, profile, cwd=CWD, level=level)
    assert (Strategy.AFTERANY, None, 4) == (made.strategy, made.array, made.links)
    assert (
        "strategy  afterany: the program writes files of its own, so no two links may overlap"
        in made.describe()
    )
    assert chain_record(spec, profile, made, chain="x", created=0.0)["alone"]
    later = plan_chain(spec, profile, cwd=CWD, later=[level])
    assert (Strategy.AFTERANY, False) == (later.strategy, later.fenced)


@pytest.mark.parametrize(
    ("site", "keys"),
    [({}, {"chain": {"strategy": "array"}}), ({"chain": {"strategy": "array"}}, {})],
)
def test_an_array_of_such_programs_is_had_for_the_asking(
    site: dict[str, Any], keys: dict[str, Any]
) -> None:
    """With a word about it; a program with a Checkpointer needs none."""
    spec, profile = both({**LAB, **site}, partition="gpu", **keys)
    made = plan_chain(spec, profile, cwd=CWD, level=OWN_FILES)
    assert Strategy.ARRAY is made.strategy
    assert any("with afterany it does not start" in note for note in made.notes)
    fenced = plan_chain(spec, profile, cwd=CWD)
    assert not any("afterany" in note for note in fenced.notes)


def test_what_the_queue_takes_today_is_not_the_budget() -> None:
    """A chain that extends itself, or is resumed, would stop after what happened to fit."""
    limits = LiveLimits(None, Bound(21, "QoS 'normal'"))
    spec, profile = both({**LAB, **EXTENDS}, partition="gpu", chain={"total_time": "720h"})
    made = plan_chain(spec, profile, cwd=CWD, limits=limits)
    record = chain_record(spec, profile, made, chain="x", created=0.0)
    assert (20, 20) == (made.links, record["links"])
    assert record["spec"]["chain"]["max_links"] == made.budget > 20
    assert any(f"at most {made.budget} of" in line for line in made.describe())


@pytest.mark.parametrize("strategy", ["array", "afterany"])
def test_links_that_are_not_submitted_now_are_told(strategy: str) -> None:
    """How they come about depends on the site."""
    budget = {"total_time": "72h", "max_links": 40, "strategy": strategy}
    by_itself = plan({**LAB, **EXTENDS}, partition="gpu", chain=budget)
    assert "11 links are submitted now; the chain submits further ones itself" in by_itself.notes
    by_its_user = plan(partition="gpu", chain=budget)
    (said,) = [note for note in by_its_user.notes if "submitted now" in note]
    assert "hpc-ckpt resume" in said
    every = plan(partition="gpu", chain={**budget, "max_links": 11})
    assert not any("submitted now" in note for note in every.notes)


def test_where_one_job_is_all_links_nothing_is_left_to_submit() -> None:
    site = {**LAB, "chain": {"submit_from_compute_nodes": True, "requeue": True}}
    for strategy in ("requeue", "resubmit"):
        budget = {"total_time": "72h", "max_links": 40, "strategy": strategy}
        made = plan(site, partition="gpu", chain=budget)
        assert not any("submitted now" in note for note in made.notes)


def test_a_long_chain_of_jobs_is_submitted_in_parts() -> None:
    """One call of sbatch each; where links may submit, they go on with the rest."""
    spec, profile = both({**LAB, **EXTENDS}, partition="gpu", chain={"max_links": 400})
    made = plan_chain(spec, profile, cwd=CWD, level=OWN_FILES)
    assert MOST_JOBS == made.links
    said = "100 jobs are submitted at once instead of 400; the chain extends itself"
    assert said == made.notes[0]


def test_a_sweep_of_such_programs_goes_on_by_requeue() -> None:
    """One job each: Slurm does not start it again before it has ended."""
    spec, profile = both(LAB, members={"x": [1, 2]})
    assert Strategy.REQUEUE is plan_chain(spec, profile, cwd=CWD, level=OWN_FILES).strategy


@pytest.mark.parametrize(
    ("site", "keys", "said"),
    [
        (
            {"chain": {"requeue": False}},
            {"chain": {"strategy": "requeue"}},
            "requeue is not allowed",
        ),
        (
            {"directives": {"extra": ["--comment=a --no-req"]}},
            {"chain": {"strategy": "requeue"}},
            "'--comment=a --no-req': chain.strategy is requeue",
        ),
        (
            {},
            {"chain": {"strategy": "requeue"}, "sbatch": ["--no-requeue"]},
            "'--no-requeue': chain.strategy is requeue, and Slurm would not put the job back",
        ),
        ({}, {"chain": {"strategy": "resubmit"}}, "resubmit needs sbatch on compute nodes"),
        ({"chain": {"requeue": False}}, {"members": {"x": [1]}}, "neither requeue nor sbatch"),
        ({}, {"members": {"x": [1]}, "chain": {"strategy": "array"}}, "by requeue or resubmit"),
        ({"limits": {"max_array": 3}}, {"members": {"x": [1, 2, 3]}}, "3 are more than this site"),
        (
            {"chain": {"submit_from_compute_nodes": True}},
            {"members": {"x": [1]}, "parallel": 1, "chain": {"strategy": "resubmit"}},
            "parallel: with chain.strategy resubmit",
        ),
        (
            {"chain": {"submit_from_compute_nodes": True, "requeue": False}},
            {"members": {"x": [1]}, "parallel": 1},
            "parallel: with chain.strategy resubmit",
        ),
        (
            {},
            {"command": "x {a}", "members": [{"a": 1}, {"b": 2}]},
            "members: b-2 has no value for a, which the command mentions as {a}",
        ),
        ({}, {"chain": {"min_time": "9h"}}, "chain.min_time: more than a link may take"),
        ({}, {"chain": {"min_time": "2 min"}}, "chain.min_time: 2m is too short"),
    ],
)
def test_what_a_site_cannot_do_is_refused(
    site: dict[str, object], keys: dict[str, object], said: str
) -> None:
    assert said in refusal({**LAB, **site}, **keys)


def test_a_sweep_is_one_array_of_its_members() -> None:
    made = limited({}, LiveLimits(), members={"lr": ["1", "2", "3"]}, parallel=2)
    assert ("1-3%2", "requeue") == (made.array, made.strategy.value)
    assert ("lr-1", "lr-2", "lr-3") == made.members
    assert "the command does not mention {lr}" in made.notes[-1]


def test_members_may_have_other_names_where_the_command_mentions_none() -> None:
    """The program reads them from its environment then; ${a} is bash's."""
    members = [{"a": "1", "c": "3"}, {"b": "2", "c": "4"}]
    made = limited({}, LiveLimits(), command="x {c} ${a}", members=members)
    assert "the command does not mention {a}, {b}:" in made.notes[-1]


def test_spare_links_follow_from_how_often_the_site_ends_a_job() -> None:
    site = {"failures": {"mtbf": "100h", "preemption": "10h"},
            "partitions": {"gpu": {"max_time": "8h", "preempt": {}}}}  # fmt: skip
    often = limited(site, LiveLimits(), chain={"total_time": "72h"})
    guess = limited({"partitions": site["partitions"]}, LiveLimits(), chain={"total_time": "72h"})
    assert (10 + 13, 20) == (often.links, guess.links)


def test_a_root_where_files_are_purged_or_the_home_is_said() -> None:
    spec, profile = both({**LAB, "storage": {"scratch": {
        "path": "/scratch/$USER", "survives": "node", "purge": "30 days", "quota": "1T"}}},
        partition="gpu")  # fmt: skip
    here = spec.model_copy(update={"root": "/scratch/me/run"})
    notes = " ".join(plan_chain(here, profile, cwd=CWD).notes)
    assert "untouched for 30 days are removed" in notes
    assert "one user may have 1T" in notes
    there = spec.model_copy(update={"root": "/home/u/run"})
    notes = " ".join(plan_chain(there, profile, cwd=CWD, home="/home/u").notes)
    assert "root is on the home directory" in notes


# ── chain.json ────────────────────────────────────────────────────────────────────────────
def test_the_record_of_a_chain() -> None:
    """Everything a link must know, as JSON, with durations as they were written."""
    spec, profile = both(
        LAB, partition="gpu", chain={"total_time": "72:00:00"}, resources={"cpus": 8}
    )
    made = plan_chain(spec, profile, cwd=CWD)
    code = {"git": "abc", "dirty": False}
    record = chain_record(spec, profile, made, chain="some-uuid", created=1.5, code=code)
    assert record == json.loads(json.dumps(record))
    assert {
        "format_version": 1,
        "chain": "some-uuid",
        "name": "train",
        "created": 1.5,
        "version": __version__,
        "command": "python train.py",
        "argv": ["bash", "-o", "pipefail", "-c", "python train.py"],
        "cwd": "/home/u/project",
        "threads": 8,
        "backend": "slurm",
        "levels": [],
        "choice": {"level": "model", "rejected": {}},
        "then": [],
        "lead_s": None,
        "alone": False,
        "strategy": "array",
        "links": 11,
        "gpus": 0,
        "code": code,
        "after_generation": 0,
        "jobs": [],
    } == {key: value for key, value in record.items() if key not in ("spec", "profile")}
    chain = record["spec"]["chain"]
    assert ("72:00:00", "8h", 11) == (chain["total_time"], chain["link_time"], chain["max_links"])
    assert ("halt", 5) == (chain["on_cancel"], chain["retries"])
    assert ("USR1", "30s") == (record["profile"]["signal"]["name"], record["profile"]["kill_wait"])


def test_the_runtime_reads_its_settings_from_the_record(tmp_path: Path) -> None:
    """The other side of the party wall: policy, retention and signal arrive as asked for."""
    spec, profile = both(
        {"cluster": "lab", "signal": {"name": "USR2"}},
        checkpoint={"policy": "every 7 steps", "keep": {"last": 2, "best": "loss"}, "memory": "2G"},
    )
    record = chain_record(spec, profile, plan_chain(spec, profile, cwd=CWD), chain="x", created=0.0)
    (tmp_path / "chain.json").write_text(json.dumps(record))
    resolved = settings.resolve(file=tmp_path / "chain.json", environ={})
    assert ("every 7 steps", 2, "loss", "SIGUSR2") == (
        str(resolved.policy),
        resolved.keep.last,
        resolved.keep.best and resolved.keep.best.metric,
        resolved.signal.name,
    )
    assert (2 * 1024**3, (TierWish("root"),)) == (resolved.memory, resolved.tiers)


def test_the_runtime_finds_the_tiers_of_the_record(tmp_path: Path) -> None:
    """The example of the design, with a variable that only the node knows."""
    spec, profile = both({"cluster": "lab", "storage": STORAGE}, tiers=["local", "shared"])
    record = chain_record(spec, profile, plan_chain(spec, profile, cwd=CWD), chain="x", created=0.0)
    (tmp_path / "chain.json").write_text(json.dumps(record))
    environ = {"TMPDIR": "/tmp/job-7", "USER": "me"}
    resolved = settings.resolve(file=tmp_path / "chain.json", environ=environ)
    assert (
        TierWish("local", Path("/tmp/job-7"), Survives.PROCESS),
        TierWish("shared", Path("/scratch/me/hpc_ckpt"), Survives.NODE, 1024**4),
        TierWish("root"),
    ) == resolved.tiers

"""Each rule of the doctor, once where all is well and once where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_ckpt.chain.cluster import Association, Maintenance, Qos, Survey
from hpc_ckpt.chain.doctor import Diagnosis, cluster_findings
from hpc_ckpt.chain.findings import Finding, Grade, note, ok, wrong
from hpc_ckpt.chain.profile import Profile
from hpc_ckpt.chain.survey import parse_config, parse_nodes, parse_partitions

NOW = 1794800000.0
CONFIG = """\
ClusterName             = lab
AccountingStorageType   = accounting_storage/slurmdbd
KillWait                = 30 sec
JobRequeue              = 1
KillOnBadExit           = 0
MaxArraySize            = 1001
MinJobAge               = 300 sec
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
SLURM_VERSION           = 22.05.8
"""
PARTITIONS = """\
PartitionName=gpu Default=YES GraceTime=0 MaxTime=08:00:00 Nodes=c1 PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=low Default=NO GraceTime=10 MaxTime=1-00:00:00 Nodes=c1 PriorityTier=1 PreemptMode=REQUEUE State=UP
"""  # noqa: E501 - pasted
NODES = "NodeName=c1 Gres=gpu:a100:4 Partitions=gpu,low\n"
ME = Association(account="a", qos=("normal",), default_qos="normal", max_jobs=None, max_submit=500)
FITTING: dict[str, Any] = {
    "cluster": "lab",
    "kill_wait": "30s",
    "partitions": {
        "gpu": {"max_time": "8h", "gpus": ["a100"]},
        "low": {"max_time": "24h", "preempt": {"mode": "requeue", "grace": "10s"}},
    },
}


def survey(config: str = "", partitions: str = PARTITIONS, **more: Any) -> Survey:
    """The cluster of the profile above; `config` is laid over its configuration."""
    known: dict[str, Any] = {
        "nodes": parse_nodes(NODES), "associations": (ME,), "qos": (), "maintenance": (),
    }  # fmt: skip
    return Survey(
        config=parse_config(config + "\n" + CONFIG),
        partitions=parse_partitions(partitions),
        **{**known, **more},
    )


def profile(**keys: Any) -> Profile:
    return Profile.model_validate({**FITTING, **keys})


def examine(live: Survey | None = None, **keys: Any) -> dict[str, Finding]:
    """Findings by name; of several with one name, the worst."""
    rank = [Grade.OK, Grade.NOTE, Grade.WRONG]
    found: dict[str, Finding] = {}
    for finding in cluster_findings(live or survey(), profile(**keys), now=NOW):
        before = found.get(finding.what)
        if before is None or rank.index(finding.grade) > rank.index(before.grade):
            found[finding.what] = finding
    return found


def test_a_profile_that_fits_has_only_good_findings() -> None:
    """Nothing to do, nothing to know."""
    assert {Grade.OK} == {finding.grade for finding in examine().values()}


SMALL = PARTITIONS.replace("08:00:00", "04:00:00")
LARGE = PARTITIONS.replace("08:00:00", "12:00:00")
CHANGES = [
    ("cluster", {"cluster": "other"}, {}, Grade.NOTE, "another cluster's profile"),
    ("Slurm", {}, {"config": "SLURM_VERSION = 17.11.2"}, Grade.NOTE, "older than 20.11"),
    ("Slurm", {}, {"config": "SLURM_VERSION = (null)"}, Grade.NOTE, ""),
    ("process tracking", {}, {"config": "ProctrackType = proctrack/linuxproc"}, Grade.NOTE, "TERM"),
    ("time to end", {"kill_wait": "60s"}, {}, Grade.WRONG, "write kill_wait: 30s"),
    ("time to end", {"kill_wait": "10s"}, {}, Grade.WRONG, "write kill_wait: 30s"),
    ("time to end", {}, {"config": "KillWait = (null)"}, Grade.NOTE, ""),
    ("KillOnBadExit", {}, {"config": "KillOnBadExit = 1"}, Grade.NOTE, "--kill-on-bad-exit=0"),
    ("requeue", {}, {"config": "JobRequeue = 0"}, Grade.NOTE, ""),
    ("requeue", {"chain": {"strategy": "requeue", "requeue": "false"}}, {}, Grade.WRONG,
     "write requeue: true"),
    ("arrays", {"limits": {"max_array": 5000}}, {}, Grade.WRONG, "write max_array: 1001"),
    ("arrays", {}, {"config": "MaxArraySize = 0"}, Grade.WRONG, "write strategy: afterany"),
    ("arrays", {}, {"config": "MaxArraySize = (null)"}, Grade.NOTE, ""),
    ("jobs in the queue", {"limits": {"max_submit": 900}}, {}, Grade.WRONG,
     "write max_submit: 500"),
    ("jobs in the queue", {}, {"associations": None}, Grade.NOTE, "write limits.max_submit"),
    ("memory of jobs", {}, {"config": "MinJobAge = 10 sec"}, Grade.NOTE, "may stay unknown"),
    ("jobs of others", {"sharing": "group"}, {"config": "PrivateData = accounts,jobs"},
     Grade.NOTE, "must know it over"),
    ("partition gpu", {}, {"partitions": SMALL}, Grade.WRONG, "write max_time: 4h"),
    ("partition gpu", {}, {"partitions": LARGE}, Grade.NOTE, "could be longer"),
    ("partition gpu", {}, {"partitions": PARTITIONS.replace("State=UP", "State=DOWN", 1)},
     Grade.NOTE, ""),
    ("partition gpu", {}, {"nodes": parse_nodes(NODES.replace("a100", "h100"))}, Grade.WRONG,
     "write gpus: [h100]"),
    ("partition low", {"partitions": {"low": {"max_time": "24h"}}}, {}, Grade.WRONG,
     "write preempt: {mode: requeue, grace: 10s}"),
    ("partition low", {"partitions": {"low": {"preempt": {"mode": "cancel", "grace": "10s"}}}}, {},
     Grade.WRONG, "write preempt: {mode: requeue, grace: 10s}"),
    ("partition low", {"partitions": {"low": {"preempt": {"grace": "120s"}}}}, {}, Grade.WRONG,
     "write preempt: {mode: requeue, grace: 10s}"),
    ("partition low", {"partitions": {"low": {"preempt": {"grace": "5s"}}}}, {}, Grade.NOTE,
     "write preempt: {mode: requeue, grace: 10s}"),
    ("partition low", {"partitions": {"low": {"preempt": {"grace": "0s"}}}},
     {"partitions": PARTITIONS.replace("GraceTime=10", "GraceTime=0")}, Grade.NOTE, "save often"),
    ("partition gpu", {"partitions": {"gpu": {"preempt": {}}}}, {}, Grade.NOTE, "spare links"),
    ("partition nope", {"partitions": {"nope": None}}, {}, Grade.WRONG, "correct its name"),
    ("other partitions", {"partitions": {"gpu": None}}, {}, Grade.NOTE, "add them"),
    ("partitions", {"partitions": {}}, {}, Grade.NOTE, "asked at submission"),
    ("maintenance", {}, {"maintenance": None}, Grade.NOTE, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("what", "said", "live", "grade", "advice"),
    CHANGES,
    ids=[f"{number}-{change[0]}" for number, change in enumerate(CHANGES)],
)
def test_what_does_not_fit_is_found(
    what: str, said: dict[str, Any], live: dict[str, Any], grade: Grade, advice: str
) -> None:
    """With what to write instead; where all fits the same finding is good (above)."""
    found = examine(survey(**live), **said)[what]
    assert grade == found.grade
    assert advice in found.advice


def test_types_of_gpus_that_are_gone_are_only_a_note() -> None:
    """Nobody is refused for them."""
    found = examine(partitions={"gpu": {"gpus": ["a100", "k80"]}})["partition gpu"]
    assert (Grade.NOTE, "GPUs: a100") == (found.grade, found.seen)


@pytest.mark.parametrize(
    ("config", "grade", "seen"),
    [
        ("PreemptType = preempt/none", Grade.OK, "nothing is preempted"),
        ("", Grade.OK, "TERM: the steps hear it"),
        ("SlurmctldParameters = preempt_send_user_signal", Grade.OK, "batch process hears USR1"),
        ("PreemptParameters = send_user_signal", Grade.OK, "batch process hears USR1"),
        ("PreemptType = preempt/qos", Grade.NOTE, "By QoS: scavenge (requeue, 120s grace)"),
    ],
)
def test_how_a_preemption_announces_itself(config: str, grade: Grade, seen: str) -> None:
    """Both ways are heard; by QoS, the profile cannot say who is preempted."""
    base = Qos(name="q", preempts=(), mode=None, grace_s=0.0, max_submit=None, max_wall_s=None)
    mode = profile().partitions["low"].preempt
    assert mode is not None
    prey = replace(base, name="scavenge", mode=mode.mode, grace_s=120.0)
    live = survey(config, qos=(prey, replace(base, preempts=("scavenge",))))
    found = examine(live)["preemption notice"]
    assert grade == found.grade
    assert seen in found.seen


@pytest.mark.parametrize(
    ("start", "end", "seen"),
    [
        (NOW + 7200, NOW + 90000, "monthly begins in 2h, 25 nodes"),
        (NOW - 60, NOW + 60, "monthly begins now, 25 nodes"),
        (NOW - 7200, NOW - 60, "none within a week"),
        (NOW + 30 * 86400, NOW + 31 * 86400, "none within a week"),
    ],
)
def test_maintenance_that_comes_soon_is_told(start: float, end: float, seen: str) -> None:
    """Past and far ones are not."""
    monthly = Maintenance(name="monthly", start=start, end=end, nodes=25)
    assert seen == examine(survey(maintenance=(monthly,)))["maintenance"].seen


@pytest.mark.parametrize(
    ("config", "wait"),
    [("", "2m"), ("AuthInfo = cred_expire=5", "5s"),
     ("SchedulerParameters = requeue_delay=10", "10s")],
)  # fmt: skip
def test_how_long_a_requeued_job_waits_is_told(config: str, wait: str) -> None:
    """A chain by requeue waits so long before each link."""
    assert f"a requeued job waits at least {wait}" == examine(survey(config))["requeue"].seen


def test_a_limit_of_nobody_is_no_limit() -> None:
    """Asked and answered: there is none."""
    free = survey(associations=(replace(ME, max_submit=None),))
    assert "no limit for you" == examine(free)["jobs in the queue"].seen


def test_a_diagnosis_counts_what_is_wrong() -> None:
    """Notes are not."""
    findings = (ok("a", "x"), note("b", "x"), wrong("c", "x", "y", "z"))
    assert 1 == Diagnosis("lab", findings).wrong

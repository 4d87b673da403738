"""A generated profile: it loads again, and says what the cluster said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hpc_ckpt.chain.cluster import Qos, Survey
from hpc_ckpt.chain.generate import profile_text
from hpc_ckpt.chain.layers import load
from hpc_ckpt.chain.profile import PreemptMode, Profile, Strategy
from hpc_ckpt.chain.survey import parse_config, parse_nodes, parse_partitions

CONFIG = """\
ClusterName             = lab
KillWait                = 5 sec
MaxArraySize            = 1001
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
AuthInfo                = cred_expire=5
SLURM_VERSION           = 22.05.8
"""
PARTITIONS = """\
PartitionName=gpu Default=YES QoS=N/A GraceTime=0 MaxTime=08:00:00 Nodes=c[1-2] PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=lowpriority Default=NO GraceTime=10 MaxTime=1-00:00:00 Nodes=c[1-3] PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=null AllowAccounts=a,b Default=NO GraceTime=0 MaxTime=UNLIMITED Nodes=c3 PriorityTier=1 PreemptMode=GANG,SUSPEND State=DOWN
"""  # noqa: E501 - pasted
NODES = """\
NodeName=c1 Gres=gpu:a100:4(S:0-1) Partitions=gpu,lowpriority
NodeName=c2 Gres=gpu:1g.10gb:2 Partitions=gpu,lowpriority
NodeName=c3 Gres=(null) Partitions=lowpriority,null
"""


def survey(config: str = CONFIG, partitions: str = PARTITIONS) -> Survey:
    return Survey(
        config=parse_config(config),
        partitions=parse_partitions(partitions),
        nodes=parse_nodes(NODES),
    )


def loaded(text: str, folder: Path) -> Profile:
    (folder / "site.yaml").write_text(text)
    environ = {"XDG_CONFIG_HOME": str(folder)}
    return load({"command": "x"}, profile="./site.yaml", cwd=folder, environ=environ).profile


def test_it_loads_and_says_what_the_cluster_said(tmp_path: Path) -> None:
    """Names that YAML would read otherwise are quoted."""
    found = loaded(profile_text(survey()), tmp_path)
    assert ("lab", "5s", "USR1", None) == (
        found.cluster, found.kill_wait, found.signal.name, found.chain.strategy,
    )  # fmt: skip
    gpu, low, null = (found.partitions[name] for name in ("gpu", "lowpriority", "null"))
    assert ("8h", ("1g.10gb", "a100"), None) == (gpu.max_time, gpu.gpus, gpu.preempt)
    assert low.preempt is not None
    assert ("1d", PreemptMode.REQUEUE, "10s") == (
        low.max_time, low.preempt.mode, low.preempt.grace,
    )  # fmt: skip
    assert (None, ()) == (null.max_time, null.gpus)


def test_what_slurm_does_not_know_is_there_to_be_filled_in(tmp_path: Path) -> None:
    """Each commented section loads once its marks are removed."""
    text = profile_text(survey())
    sections = ("contact", "limits", "failures", "storage", "  local", "  shared", "environment",
                "tools", "directives", "sharing")  # fmt: skip
    for section in sections:
        assert f"\n# {section}:" in text
        text = text.replace(f"\n# {section}:", f"\n{section}:")
    found = loaded(text, tmp_path)
    assert ("help@example.edu", "30d") == (found.contact, found.storage["shared"].purge)


def test_remarks_say_what_a_key_cannot() -> None:
    """Who may use a partition, and its state."""
    text = profile_text(survey())
    assert "# no time limit; only for the accounts a, b; its state was DOWN" in text


def test_a_cluster_without_arrays_gets_another_strategy(tmp_path: Path) -> None:
    """MaxArraySize 0 switches them off."""
    text = profile_text(survey(CONFIG.replace("1001", "0")))
    assert Strategy.AFTERANY == loaded(text, tmp_path).chain.strategy


def test_preemption_by_qos_is_told(tmp_path: Path) -> None:
    """The profile has no place for it; a person shall know."""
    low = Qos(name="low", preempts=(), mode=None, grace_s=120.0, max_submit=7, max_wall_s=None)
    high = replace(low, name="high", preempts=("low",))
    by_qos = replace(survey(CONFIG.replace("partition_prio", "qos")), qos=(low, high))
    text = profile_text(by_qos)
    assert "# Jobs of QoS low are preempted: as the cluster's PreemptMode, 120s grace." in text
    assert loaded(text, tmp_path).partitions["lowpriority"].preempt is None


@pytest.mark.parametrize("name", ["a b", "x: y", "#", "[a]", "é", "no", "12", "a'b", 'a"b'])
def test_any_name_survives(name: str, tmp_path: Path) -> None:
    """Whatever a site calls its partitions."""
    base = survey()
    odd = replace(base, partitions=(replace(base.partitions[0], name=name),))
    text = profile_text(odd)
    assert [name] == list(loaded(text, tmp_path).partitions)
    yaml.safe_load(text)


def test_a_cluster_that_says_nothing(tmp_path: Path) -> None:
    """Slurm's own defaults."""
    nothing = Survey(config=parse_config(""), partitions=())
    found = loaded(profile_text(nothing), tmp_path)
    assert ("cluster", "30s", {}) == (found.cluster, found.kill_wait, found.partitions)

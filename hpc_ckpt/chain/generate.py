"""A profile for a cluster nobody has described: what Slurm says of itself, as commented YAML.

Text out, nothing else. What Slurm does not know (storage, modules, whom to write to) is there
as comments for a person to fill in.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ..units import format_duration
from .cluster import ClusterPartition, Survey
from .profile import PreemptMode

_PLAIN = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_HEAD = """\
# {cluster}: what Slurm {version} says of itself, written by `hpc-ckpt profile generate`.
# Check it, fill in what Slurm does not know, and put it where it is found by its name:
#   ~/.config/hpc_ckpt/clusters/{file}.yaml      for yourself
#   /etc/hpc_ckpt/clusters/{file}.yaml           for everybody
# Then `hpc-ckpt doctor` compares it with the cluster, and tries its signals in a small job.
cluster: {name}
# contact: help@example.edu
"""
_TAIL = """\
# Asked of the cluster at each submission; write them to be stricter than it is.
# limits: {{max_array: {max_array}, max_submit: {max_submit}}}
# How often a job ends early here; spare links are planned from it.
# failures: {{mtbf: 240h, preemption: 6h}}
# What `tiers` of a spec may name. survives: node (shared) or process (gone with the job).
# storage:
#   local: {{path: "${{TMPDIR:-/tmp}}", survives: process}}
#   shared: {{path: /scratch/$USER/hpc_ckpt, survives: node, quota: 1T, purge: 30d}}
# Without modules and prologue the environment that is active at submission is activated again.
# environment: {{modules: [miniconda3]}}
# tools: {{dmtcp: {{module: dmtcp}}}}
# directives: {{extra: ["--constraint=ib"], skip: ["--mem"]}}
# sharing: group
"""


def profile_text(survey: Survey) -> str:
    """YAML that loads as a profile of this cluster."""
    config = survey.config
    cluster = config.cluster or "cluster"
    head = _HEAD.format(
        cluster=_remark(cluster),
        file=_remark(cluster),
        name=_word(cluster),
        version=config.version or "of unknown version",
    )
    tail = _TAIL.format(
        max_array=config.max_array or 1001,
        max_submit=min(survey.submit_limits(), default=100),
    )
    middle = [*_partitions(survey), *_signals(survey), *_chain(survey)]
    return head + "\n".join(middle) + "\n" + tail


def _partitions(survey: Survey) -> Iterator[str]:
    if not survey.partitions:
        return
    yield "partitions:"
    for partition in survey.partitions:
        remarks = list(_remarks(survey, partition))
        if remarks:
            yield f"  # {_remark('; '.join(remarks))}"
        yield f"  {_word(partition.name)}: {{{', '.join(_keys(survey, partition))}}}"


def _keys(survey: Survey, partition: ClusterPartition) -> Iterator[str]:
    limit = survey.max_time_s(partition)
    if limit:
        yield f"max_time: {format_duration(limit)}"
    gpus = survey.gpu_types(partition)
    if gpus is not None:
        yield f"gpus: [{', '.join(map(_word, gpus))}]"
    mode = survey.preempted(partition)
    if mode is not None:
        yield f"preempt: {{mode: {mode.value}, grace: {partition.grace_s:g}s}}"


def _remarks(survey: Survey, partition: ClusterPartition) -> Iterator[str]:
    if partition.default:
        yield "the default"
    if not survey.max_time_s(partition):
        yield "no time limit"
    if survey.nodes is not None and survey.gpu_types(partition) is None:
        yield "its GPUs have no types"
    if partition.accounts is not None:
        yield f"only for the accounts {', '.join(partition.accounts)}"
    if partition.state != "UP":
        yield f"its state was {partition.state}"
    if survey.preempted(partition) is PreemptMode.SUSPEND:
        yield "a suspended link holds its memory and its GPUs, and its clock goes on"


def _signals(survey: Survey) -> Iterator[str]:
    config = survey.config
    for qos in survey.preempted_qos():
        mode = qos.mode.value if qos.mode else "as the cluster's PreemptMode"
        yield f"# Jobs of QoS {_remark(qos.name)} are preempted: {mode}, {qos.grace_s:g}s grace."
    yield "# The warning before the end of a link. A backstop: what a save takes is measured."
    yield "signal: {name: USR1, lead: 180s}"
    yield "# Slurm's KillWait."
    yield f"kill_wait: {30.0 if config.kill_wait_s is None else config.kill_wait_s:g}s"


def _chain(survey: Survey) -> Iterator[str]:
    config = survey.config
    arrays = config.max_array is None or config.max_array > 1
    yield f"# A requeued job waits at least {format_duration(config.requeue_delay_s)} here."
    yield "chain:"
    if arrays:
        yield "  # Left out: array, and afterany for programs that write files of their own."
        yield "  # strategy: array"
    else:
        yield "  strategy: afterany"
    yield "  requeue: true"
    yield "  # hpc-ckpt doctor tries whether sbatch works on compute nodes."
    yield "  submit_from_compute_nodes: false"


# ── words ─────────────────────────────────────────────────────────────────────────────────
def _word(text: str) -> str:
    """A YAML scalar that is read back as this text."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false")
    return text if plain else json.dumps(text, ensure_ascii=False)


def _remark(text: str) -> str:
    """What can stand in a comment."""
    return " ".join(text.split())

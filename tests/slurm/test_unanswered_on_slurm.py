"""sbatch submits and its answer is lost: one chain on one root all the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chains import PROFILE, cli, note, wait_until
from devcluster import DevCluster

from hpc_ckpt.chain.past import jobs_of
from hpc_ckpt.rundir import RunDir

pytestmark = pytest.mark.slurm

SPEC = {
    "name": "lost",
    "command": ["bash", "-c", ": HPC_CKPT_NOTICE; sleep 60"],
    "root": "run",
    "partition": "lowpriority",
    "chain": {"link_time": "3 min", "max_links": 3, "strategy": "array"},
}
LOSES = """\
#!/bin/bash
{real} "$@" >>answers
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""


def lie(place: Path, **programs: str) -> None:
    """Commands to be found before the real ones."""
    (place / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (place / "bin" / name).write_text(text.format(real=shutil.which(name)))
        (place / "bin" / name).chmod(0o755)


def submit(cluster: DevCluster, place: Path, *, lying: bool) -> tuple[int, str]:
    environment = cluster.environment
    if lying:
        environment["PATH"] = f"{place / 'bin'}:{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "hpc_ckpt.cli", "submit", "s.yaml", "--profile", "./site.yaml"],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def queued(cluster: DevCluster) -> set[str]:
    return set(cluster.run("squeue", "-h", "-o", "%F").stdout.split())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "s.yaml").write_text(json.dumps(SPEC))
    (tmp_path / "site.yaml").write_text(json.dumps(PROFILE))
    return tmp_path


def test_the_array_is_found_in_the_queue(idle_cluster: DevCluster, place: Path) -> None:
    """As if sbatch had said it."""
    lie(place, sbatch=LOSES)
    code, said = submit(idle_cluster, place, lying=True)
    assert 0 == code, said
    (array,) = (place / "answers").read_text().split()
    assert f"submitted array {array}" in said
    assert [array] == jobs_of(RunDir(place / "run"))
    code, said = submit(idle_cluster, place, lying=False)
    assert (2, True) == (code, f"job {array} is a chain on it already" in said)
    assert {array} == queued(idle_cluster)
    note(
        "sbatch submits, its answer is lost",
        "found in the queue by its script; a second submission is refused",
    )


def test_what_nobody_knew_is_found_by_the_next_submission(
    idle_cluster: DevCluster, place: Path
) -> None:
    """squeue did not answer either: refused, written down, and stopped by its name.

    It is held: a link that has begun writes down its own job.
    """
    held = {**PROFILE, "directives": {"extra": ["--hold"]}}
    (place / "site.yaml").write_text(json.dumps(held))
    mute = '#!/bin/bash\nif [ -e answers ]; then exit 1; fi\nexec {real} "$@"\n'
    lie(place, sbatch=LOSES, squeue=mute)
    code, said = submit(idle_cluster, place, lying=True)
    assert (1, True) == (code, "whether it has submitted is not known" in said), said
    (array,) = (place / "answers").read_text().split()
    code, said = submit(idle_cluster, place, lying=False)
    assert (2, True) == (code, f"job {array} was submitted with its script" in said), said
    assert {array} == queued(idle_cluster)
    stopped = cli(idle_cluster, place, "stop", "run")
    assert re.search(rf"cancelled .* {array}", stopped.stdout), stopped
    wait_until(lambda: queued(idle_cluster) == set(), 90)

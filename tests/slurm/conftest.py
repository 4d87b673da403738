"""One real Slurm for all tests in this folder; see slurm/devcluster/README.md.

DEVCLUSTER_PROCTRACK=linuxproc (or pgid, cgroup) runs the suite under another process tracking:
signals reach different processes there. DEVCLUSTER_KILL_WAIT=12 leaves a job so many seconds
between TERM and KILL: under linuxproc srun itself needs seven of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# slurm/ holds what administrators and developers run; it is no package and is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "slurm" / "devcluster"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "levels"))  # molecules.py

from chains import KILL_WAIT_S, TRACKING
from devcluster import DevCluster, MissingPackages, Options, find_programs


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the daemons said when a test on the shared cluster failed."""
    report = yield
    arguments = getattr(item, "funcargs", {})
    running = arguments.get("idle_cluster") or arguments.get("cluster")
    if report.failed and isinstance(running, DevCluster):
        report.sections.extend((f"log {name}", text) for name, text in running.logs().items())
    return report


@contextlib.contextmanager
def _temporary_directory() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="hpc-slurm-"))
    # Jobs of other users read the configuration in it.
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skip on a person's own machine without Slurm; in CI that is a failure."""
    _require(with_accounting=False)


@pytest.fixture(scope="session")
def accounting_installed() -> None:
    """The same for tests that need sacct."""
    _require(with_accounting=True)


def _require(*, with_accounting: bool) -> None:
    try:
        find_programs(with_compiler=True, with_accounting=with_accounting)
    except MissingPackages as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the Slurm tests are required here: {error}")
        pytest.skip(str(error))


@pytest.fixture
def cluster_directory(slurm_installed: None) -> Iterator[Path]:
    """A short path of its own for a test that starts a cluster itself."""
    with _temporary_directory() as directory:
        yield directory


@pytest.fixture(scope="session")
def cluster(slurm_installed: None) -> Iterator[DevCluster]:
    """The shared cluster: four nodes, partitions gpu and lowpriority."""
    options = Options(proctrack=TRACKING, kill_wait_s=KILL_WAIT_S)
    with (
        _temporary_directory() as directory,
        DevCluster.start(directory, options=options) as running,
    ):
        yield running


@pytest.fixture
def idle_cluster(cluster: DevCluster) -> Iterator[DevCluster]:
    """The shared cluster without jobs and with all nodes idle, before and after the test."""
    cluster.reset()
    try:
        yield cluster
    finally:
        cluster.reset()

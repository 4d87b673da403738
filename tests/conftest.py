"""For every test: nothing of it is remembered in the home of whoever runs it; its tools."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell: every child would be deaf to Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Some virtual machines claim AMX and trap on it: torch itself dies of SIGILL in bfloat16 there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


AGAINST_THE_CLOCK = frozenset({"integration", "levels", "slurm"})
AT_RANDOM = frozenset({"test_kill_and_resume", "test_random_faults_on_slurm"})
"""What these find, they may find once in a hundred runs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes race with the clock of a machine that has others to serve: a test of these
    has a second try. The run ends with the names of those that needed it; each is to be mended."""
    for item in items:
        room = item.path.relative_to(Path(__file__).parent).parts[0]
        if room in AGAINST_THE_CLOCK and item.path.stem not in AT_RANDOM:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session", autouse=True)
def _state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_chance_level(request: pytest.FixtureRequest) -> Iterator[None]:
    """A DMTCP that happens to be here saves what a test expects to be left alone: only modules
    that say REAL_DMTCP meet it."""
    launch = shutil.which("dmtcp_launch")
    with pytest.MonkeyPatch.context() as patch:
        if launch is not None and not getattr(request.module, "REAL_DMTCP", False):
            place = str(Path(launch).parent)
            others = [path for path in os.environ["PATH"].split(os.pathsep) if path != place]
            patch.setenv("PATH", os.pathsep.join(others))
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier work that cannot be read is not waited for long."""
    from hpc_ckpt.runtime import earlier

    monkeypatch.setattr(earlier, "WAIT_S", 0.05)
    monkeypatch.setattr(earlier, "AGAIN_S", 0.01)


@pytest.fixture(scope="session")
def criu() -> Path:
    """The directory of a criu that works here, for the PATH; in CI a missing one is a failure."""
    from hpc_ckpt.levels.base import Work
    from hpc_ckpt.levels.criu_tool import find

    unpacked = Path(__file__).parents[1] / ".make" / "criu" / "criu"
    path = str(unpacked) if unpacked.exists() else shutil.which("criu")
    work = Work(argv=("true",), cwd=Path.cwd(), environ=dict(os.environ))
    found = "no criu: 'make criu' unpacks one" if path is None else find({"path": path}, work)
    if isinstance(found, str):
        if os.environ.get("CI") == "true":
            pytest.fail(f"the tests of CRIU are required here: {found}")
        pytest.skip(found)
    return Path(found.path).parent

"""Preflight: what is free, by the kernel's own files and calls, and the words for too little."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_ckpt import preflight
from hpc_ckpt.preflight import (
    check_memory,
    check_storage,
    free_memory,
    free_storage,
    in_memory,
    keep_size_allocate,
)

GIB = 1024**3
UNLIMITED_V1 = "9223372036854771712"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., int | None]:
    """free_memory() of a machine with 8 GiB available and these cgroup files."""

    def ask(membership: str, files: dict[str, str] | None = None) -> int | None:
        proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
        available = f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB"
        write(proc, {"meminfo": available, "self/cgroup": membership})
        write(cgroups, files or {})
        return free_memory(proc=proc, cgroups=cgroups)

    return ask


# ── memory ────────────────────────────────────────────────────────────────────────────────
def test_without_cgroups_the_machine_decides(machine: Callable[..., int | None]) -> None:
    """MemAvailable counts a file cache as free, MemFree would not."""
    assert 8 * GIB == machine("0::/")


def test_nothing_told_is_not_known(tmp_path: Path) -> None:
    """Then nobody is refused."""
    assert free_memory(proc=tmp_path, cgroups=tmp_path) is None
    assert check_memory(1 << 60, proc=tmp_path, cgroups=tmp_path) is None


def test_a_limit_of_the_second_version_counts(machine: Callable[..., int | None]) -> None:
    """What is used is gone, but for its file cache; "max" is no limit."""
    files = {
        "job/memory.max": str(4 * GIB),
        "job/memory.high": "max",
        "job/memory.current": str(3 * GIB),
        "job/memory.stat": f"anon {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 2}",
    }
    assert 2 * GIB == machine("0::/job", files)


def test_the_throttling_limit_counts_as_one(machine: Callable[..., int | None]) -> None:
    """Above memory.high the job would hardly move."""
    files = {
        "job/memory.max": str(4 * GIB),
        "job/memory.high": str(3 * GIB),
        "job/memory.current": str(1 * GIB),
    }
    assert 2 * GIB == machine("0::/job", files)


@pytest.mark.parametrize("tight", ["", "slurm/", "slurm/job_7/", "slurm/job_7/step_0/"])
@pytest.mark.parametrize(
    ("membership", "root", "limit", "usage"),
    [
        ("0::/slurm/job_7/step_0", "", "memory.max", "memory.current"),
        ("4:memory:/slurm/job_7/step_0\n0::/", "memory/", "memory.limit_in_bytes",
         "memory.usage_in_bytes"),
        ("11:cpu,memory:/slurm/job_7/step_0", "memory/", "memory.limit_in_bytes",
         "memory.usage_in_bytes"),
        ("1:cpu:/x\n0::/slurm/job_7/step_0", "unified/", "memory.max", "memory.current"),
    ],
    ids=["v2", "v1", "v1 of two controllers", "hybrid"],
)  # fmt: skip
def test_the_tightest_group_on_the_way_to_the_root_counts(
    machine: Callable[..., int | None],
    membership: str,
    root: str,
    limit: str,
    usage: str,
    tight: str,
) -> None:
    """Slurm sets the limit on the job, and on the step, or on neither."""
    files = {}
    for group in ("", "slurm/", "slurm/job_7/", "slurm/job_7/step_0/"):
        files[f"{root}{group}{limit}"] = str(2 * GIB) if group == tight else UNLIMITED_V1
        files[f"{root}{group}{usage}"] = str(GIB // 2)
    assert 3 * GIB // 2 == machine(membership, files)


def test_the_cache_of_the_first_version_is_counted_with_that_of_its_children(
    machine: Callable[..., int | None],
) -> None:
    """Usage is hierarchical there, and so are only the total_ counters."""
    files = {
        "memory/job/memory.limit_in_bytes": str(2 * GIB),
        "memory/job/memory.usage_in_bytes": str(2 * GIB),
        "memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}",
    }
    assert GIB == machine("4:memory:/job", files)


def test_a_path_of_the_host_is_passed_over_in_a_container(
    machine: Callable[..., int | None],
) -> None:
    """/proc tells a path that /sys/fs/cgroup does not have; the container's root is asked."""
    files = {"memory.max": str(GIB), "memory.current": "0"}
    assert GIB == machine("0::/kubepods/pod-7/../x", files)


def test_files_that_are_none_of_ours_break_nothing(machine: Callable[..., int | None]) -> None:
    """A kernel may say things this version has never heard of."""
    files = {"job/memory.max": "lots", "job/memory.current": "", "job/memory.stat": "x\n\ny z w"}
    assert 8 * GIB == machine("nonsense\n0::/job\n::", files)


def test_the_real_kernel_is_understood() -> None:
    """Here and now: some memory is free, and not more than there is."""
    free = free_memory()
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_too_little_memory_is_told_with_what_to_do(tmp_path: Path) -> None:
    """Needed, there, and the way out; the user's own limit comes first."""
    write(tmp_path, {"meminfo": f"MemAvailable: {2 * GIB // 1024} kB"})
    places = {"proc": tmp_path, "cgroups": tmp_path}
    assert check_memory(2 * GIB, **places) is None
    assert check_memory(2 * GIB, 2 * GIB, **places) is None
    assert (
        "snapshots need 3 GiB of memory, 2 GiB are free on this node; ask for more memory "
        "(resources.memory), or track less state"
    ) == check_memory(3 * GIB, **places)
    assert (
        "snapshots need 3 GiB of memory, checkpoint.memory allows 1 GiB; raise it to at least "
        "3072M, or track less state"
    ) == check_memory(3 * GIB, GIB, **places)


# ── storage ───────────────────────────────────────────────────────────────────────────────
def refusing(number: int) -> Callable[[int, int], None]:
    def allocate(descriptor: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    return allocate


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is treated as one on a disk, wherever the tests run."""
    monkeypatch.setattr(preflight, "in_memory", lambda place: False)
    return tmp_path


def test_the_nearest_parent_that_exists_is_asked(tmp_path: Path) -> None:
    """The directory of a tier is made when something is saved."""
    free = free_storage(tmp_path / "a" / "b")
    assert (tmp_path, True) == (free.place, free.size > 0)
    assert [] == list(tmp_path.iterdir())


def test_enough_is_no_problem_and_leaves_no_trace(disk: Path) -> None:
    """Asked for real; the space is given back and the file is gone."""
    before = os.statvfs(disk).f_bfree
    assert check_storage(disk / "tier", 1024**2, 2) is None
    assert [] == list(disk.iterdir())
    assert abs(os.statvfs(disk).f_bfree - before) * os.statvfs(disk).f_frsize < 512 * 1024**2


def test_too_little_space_is_told_with_what_to_do(disk: Path) -> None:
    """What is needed, where, what is there, what to do."""
    said = check_storage(disk, 1 << 55, 2)
    assert said is not None
    assert said.startswith(f"{disk}: 32 PiB in 2 files are needed, ")
    assert said.endswith(
        " are free; free some, keep fewer checkpoints (checkpoint.keep), "
        "or choose another directory"
    )


def test_too_few_inodes_are_told(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites count files too; a file system without a fixed number is not asked."""
    real = os.statvfs(disk)
    answers = {"f_favail": 3, "f_files": 100}

    class Answer:
        def __getattr__(self, name: str) -> int:
            return answers.get(name, getattr(real, name))

    monkeypatch.setattr(os, "statvfs", lambda path: Answer())
    assert check_storage(disk, 1, 3) is None
    assert "needed, 3 more files can be made; free some" in (check_storage(disk, 1, 4) or "")
    answers["f_files"] = 0
    assert check_storage(disk, 1, 4) is None


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_is_found_by_asking_for_the_space(disk: Path, number: int) -> None:
    """statvfs tells what the disk has left, not what this user may have of it."""
    said = check_storage(disk, 4096, 2, allocate=refusing(number))
    assert said is not None
    assert f"in 2 files are needed, it refuses them ({os.strerror(number)}); free some" in said


@pytest.mark.parametrize(
    "number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EFBIG, errno.EIO]
)
def test_a_file_system_that_cannot_be_asked_is_passed_over(disk: Path, number: int) -> None:
    """The first save will tell."""
    assert check_storage(disk, 4096, 2, allocate=refusing(number)) is None


def test_nothing_is_asked_for_where_nothing_is_needed(disk: Path) -> None:
    """fallocate(2) refuses zero bytes."""
    assert check_storage(disk, 0, 0, allocate=refusing(errno.ENOSPC)) is None


def test_the_sites_quota_can_only_refuse(disk: Path) -> None:
    """More than it allows can never fit; less may still not."""
    assert check_storage(disk, 4096, 2, quota=4096) is None
    said = check_storage(disk, 4097, 2, quota=4096)
    assert f"{disk}: 4 KiB in 2 files are needed, its quota is 4 KiB; free some" in (said or "")
    assert check_storage(disk, 1, 1, quota=4096, allocate=refusing(errno.EDQUOT)) is not None


def test_a_place_that_is_no_directory_is_told(disk: Path) -> None:
    """And so is every other reason why no file can be made."""
    (disk / "file").write_text("")
    said = check_storage(disk / "file" / "tier", 1, 1)
    assert "but it cannot be written (Not a directory); choose another directory" in (said or "")


def test_the_real_call_keeps_the_size_and_takes_the_blocks(tmp_path: Path) -> None:
    """Where it works; elsewhere it says so and writes nothing."""
    with tempfile.TemporaryFile(dir=tmp_path) as stream:
        try:
            keep_size_allocate(stream.fileno(), 1024**2)
        except OSError as error:
            assert error.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
        found = os.fstat(stream.fileno())
    assert 0 == found.st_size
    with pytest.raises(OSError, match="Bad file descriptor"):
        keep_size_allocate(-1, 4096)


ON_A_TMPFS = """
import errno, json, os, sys, tempfile
from pathlib import Path
from hpc_ckpt import preflight
from hpc_ckpt.preflight import check_storage, free_memory, in_memory, keep_size_allocate

place, answers = Path(sys.argv[1]), {}
answers["in memory"] = in_memory(place)
answers["fits"] = check_storage(place, 900_000, 2)
asked = []
check_storage(place, 900_000, 2, allocate=lambda descriptor, nbytes: asked.append(nbytes))
answers["asked for"] = asked
answers["too much"] = check_storage(place, 2_000_000, 2)
answers["inodes"] = check_storage(place, 1000, 60)
with tempfile.TemporaryFile(dir=place) as stream:
    try:
        keep_size_allocate(stream.fileno(), 2_000_000)
    except OSError as error:
        answers["the kernel says"] = errno.errorcode[error.errno]
preflight.in_memory = lambda place: False
real = preflight.free_storage
preflight.free_storage = lambda path: preflight.FreeStorage(1 << 40, None, real(path).place)
answers["probed"] = check_storage(place, 2_000_000, 2)
print(json.dumps(answers))
"""


def test_a_real_small_file_system(tmp_path: Path) -> None:
    """A tmpfs of 1 MiB and 50 inodes: refused by statvfs, and by the kernel where it is asked."""
    private = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    command = 'mount -t tmpfs -o size=1m,nr_inodes=50 tiny "$1" && exec "$2" -c "$3" "$1"'
    try:
        ended = subprocess.run(
            [*private, "sh", "-c", command, "sh", str(tmp_path), sys.executable, ON_A_TMPFS],
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip("needs unshare (util-linux)")
    if os.environ.get("CI") != "true" and ("unshare:" in ended.stderr or "mount:" in ended.stderr):
        pytest.skip(f"needs a mount namespace (util-linux): {ended.stderr.strip()}")
    assert 0 == ended.returncode, ended.stderr
    answers = json.loads(ended.stdout)
    assert (True, None, "ENOSPC") == (
        answers["in memory"], answers["fits"], answers["the kernel says"],
    )  # fmt: skip
    assert "1.91 MiB in 2 files are needed, 1 MiB are free" in answers["too much"]
    assert "60 files are needed, 49 more files can be made" in answers["inodes"]
    assert "it refuses them (No space left on device)" in answers["probed"]
    assert [] == answers["asked for"], "pages of a tmpfs are the job's memory"


def test_a_disk_is_not_in_memory(tmp_path: Path) -> None:
    """And a place that is not there is nothing."""
    assert in_memory(Path("/proc")) is False
    assert in_memory(tmp_path / "nowhere") is False

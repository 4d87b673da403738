"""The archive for those who help: complete, bounded, private, without secrets and weights."""

import json
import os
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hpc_ckpt.chain import support
from hpc_ckpt.chain.support import Report, write_report
from hpc_ckpt.errors import RootError, SchedulerError, SpecError
from hpc_ckpt.rundir import MANIFEST_NAME, CheckpointKey, RunDir

SECRET = "hunter2-hunter2"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """A run with a secret in every text of it."""
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    chain = {"chain": "x", "backend": "slurm", "jobs": ["7"], "argv": ["x", "--token", SECRET]}
    rundir.chain_file.write_text(json.dumps(chain, indent=1))
    (rundir.root / "chain.sbatch").write_text(f"export WANDB_API_KEY={SECRET}\n")
    rundir.ledger_file(1).write_text(json.dumps({"event": "x", "password": SECRET}) + "\n")
    rundir.events_file(1, "n1").write_text(json.dumps({"event": "y", "secret": SECRET}) + "\n")
    rundir.log_file(1).write_text(f"login https://me:{SECRET}@host/\n")
    (rundir.lease / "00000001").write_text('{"host": "n1"}')
    rundir.give_notice(1, "test")
    place = rundir.checkpoints / CheckpointKey(1, 20).directory_name
    place.mkdir()
    manifest = {
        "step": 20,
        "tree": {"about": {"command": ["x", f"--password={SECRET}"]}, "state": ["big"] * 9},
        "shards": [{"file": "rank-00000.safetensors", "size": 5, "digests": ["0" * 32]}],
        "digest": "0" * 32,
    }
    (place / MANIFEST_NAME).write_text(json.dumps(manifest))
    (place / "rank-00000.safetensors").write_text("WEIGHTS")
    return rundir


def answer(question: list[str]) -> str:
    return f"{' '.join(question)} Token={SECRET}\n"


def make(rundir: RunDir, target: Path, **more: Any) -> Report:
    environ = {"SLURM_CONF": "/etc/x", "HPC_CKPT_TOKEN": SECRET, "AWS_SECRET": SECRET}
    return write_report(rundir, target, environ=environ, ask=more.get("ask", answer))


def texts(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        found = {}
        for entry in tar.getmembers():
            stream = tar.extractfile(entry)
            assert stream is not None
            found[entry.name.partition("/")[2]] = stream.read().decode()
    return found


def test_names_of_files_tell_no_secret(
    rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as members, nor in the lists; two that look the same then stay two."""
    for each in (SECRET, f"{SECRET}-2"):
        (rundir.logs / f"out,token={each}").write_text("fine\n")
    report = make(rundir, tmp_path / f"r,token={SECRET}.tar.gz")
    with tarfile.open(report.path) as tar:
        assert not any(SECRET in name for name in tar.getnames())
    found = texts(report.path)
    assert {"logs/out,token=[redacted]", "logs/out,token=[redacted]-2"} <= found.keys()
    assert not any(SECRET in text for text in found.values())
    assert "logs/out,token=[redacted]:0: value of token, in the name\n" in found["redacted.txt"]
    monkeypatch.setattr(support, "MOST_FILES", 1)
    assert not any(SECRET in name for name in make(rundir, tmp_path / "s.tar.gz").left_out)


def test_everything_but_secrets_and_weights(rundir: RunDir, tmp_path: Path) -> None:
    """Every text is there, and none says the secret."""
    report = make(rundir, tmp_path / "r.tar.gz")
    found = texts(report.path)
    step = f"checkpoints/{CheckpointKey(1, 20).directory_name}/MANIFEST.json"
    assert {
        "about.json", "files.txt", "chain.json", "chain.sbatch", "ledger/00000001.jsonl",
        "events/00000001-n1.jsonl", "control/notice-1", "lease/00000001", "logs/link-00000001.log",
        "slurm/job-7.txt", "slurm/config.txt", "slurm/partitions.txt", "redacted.txt",
        "left-out.txt", step,
    } == set(found)  # fmt: skip
    assert [] == [name for name, text in found.items() if SECRET in text or "WEIGHTS" in text]
    assert "AWS_SECRET" not in found["about.json"]
    assert {"chain.json", "chain.sbatch", "logs/link-00000001.log", step} <= {
        place.file for place in report.places
    }
    assert len(report.places) == len(found["redacted.txt"].splitlines())


def test_a_manifest_is_told_without_state_and_digests(rundir: RunDir, tmp_path: Path) -> None:
    """Its tree is the program's own; `about` is what the program said of itself."""
    found = texts(make(rundir, tmp_path / "r.tar.gz").path)
    head = json.loads(next(text for name, text in found.items() if "MANIFEST" in name))
    assert 20 == head["step"]
    assert not {"tree", "digest"} & set(head)
    assert [{"file": "rank-00000.safetensors", "size": 5, "holder": None}] == head["shards"]


def test_only_the_owner_may_read_it(rundir: RunDir, tmp_path: Path) -> None:
    """Whatever the umask."""
    old = os.umask(0)
    try:
        report = make(rundir, tmp_path / "r.tar.gz")
    finally:
        os.umask(old)
    assert 0o600 == stat.S_IMODE(report.path.stat().st_mode)


def test_of_long_logs_head_and_tail(rundir: RunDir, tmp_path: Path) -> None:
    """Cut at line breaks: half a secret would not be known for one."""
    line = f"PASSWORD={SECRET}\n"
    rundir.log_file(1).write_text("first\n" + line * 50_000 + "last\n")
    found = texts(make(rundir, tmp_path / "r.tar.gz").path)["logs/link-00000001.log"]
    assert found.startswith("first\n")
    assert found.endswith("last\n")
    assert "left out …]" in found
    assert "hunter" not in found
    assert len(found) < 3 * support.END_BYTES


def test_it_is_bounded(rundir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no room is named; the records come first."""
    monkeypatch.setattr(support, "MOST_BYTES", 20_000)
    for number in range(1, 30):
        rundir.log_file(number).write_text("x\n" * 2000)
    archive = tmp_path / "r.tar.gz"
    report = make(rundir, archive)
    found = texts(archive)
    assert "chain.json" in found
    assert report.left_out
    assert set(report.left_out) == set(found["left-out.txt"].split())
    assert 40_000 > sum(map(len, found.values()))


def test_links_out_of_the_run_are_not_followed(rundir: RunDir, tmp_path: Path) -> None:
    """Where a group shares run directories, another one may have put it there."""
    (tmp_path / "private").write_text("not yours")
    (rundir.logs / "x.log").symlink_to(tmp_path / "private")
    os.mkfifo(rundir.logs / "pipe.log")
    found = texts(make(rundir, tmp_path / "r.tar.gz").path)
    assert "not yours" not in "".join(found.values())
    assert "logs/pipe.log" not in found


def test_a_scheduler_that_does_not_answer_is_asked_once(rundir: RunDir, tmp_path: Path) -> None:
    """And the archive says so."""
    asked = []

    def hang(question: list[str]) -> str:
        asked.append(question)
        raise SchedulerError(question, None, "")

    found = texts(make(rundir, tmp_path / "r.tar.gz", ask=hang).path)
    assert 1 == len(asked)
    assert "did not answer in time" in found["slurm/job-7.txt"]


def test_a_forgotten_job_does_not_end_the_asking(rundir: RunDir, tmp_path: Path) -> None:
    """The configuration is still of use."""

    def forgot(question: list[str]) -> str:
        if "job" in question:
            raise SchedulerError(question, 1, "Invalid job id specified")
        return "ClusterName=x"

    found = texts(make(rundir, tmp_path / "r.tar.gz", ask=forgot).path)
    assert "Invalid job id" in found["slurm/job-7.txt"]
    assert "ClusterName=x" == found["slurm/config.txt"]


def test_damaged_files_are_packed_all_the_same(rundir: RunDir, tmp_path: Path) -> None:
    """They are what one asks for help with."""
    rundir.chain_file.write_bytes(b"\xff\xfe{")
    place = rundir.checkpoints / CheckpointKey(1, 20).directory_name
    (place / MANIFEST_NAME).write_text('["no manifest"]')
    found = texts(make(rundir, tmp_path / "r.tar.gz").path)
    assert "{" in found["chain.json"]
    assert "not a manifest" in next(text for name, text in found.items() if "MANIFEST" in name)


def test_an_existing_file_is_left_alone(rundir: RunDir, tmp_path: Path) -> None:
    """Nor is half an archive left behind."""
    (tmp_path / "r.tar.gz").write_text("mine")
    with pytest.raises(SpecError, match="is there already"):
        make(rundir, tmp_path / "r.tar.gz")
    assert "mine" == (tmp_path / "r.tar.gz").read_text()

    def broken(question: list[str]) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(rundir, tmp_path / "half.tar.gz", ask=broken)
    assert not (tmp_path / "half.tar.gz").exists()


def test_a_place_without_a_run_is_refused(tmp_path: Path) -> None:
    """And nothing is made."""
    with pytest.raises(RootError, match="no run there"):
        make(RunDir(tmp_path / "nowhere"), tmp_path / "r.tar.gz")
    assert not (tmp_path / "r.tar.gz").exists()

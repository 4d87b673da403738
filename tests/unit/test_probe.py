"""What one machine sees of places, tools and Slurm's commands."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpc_ckpt.chain import probe
from hpc_ckpt.chain.probe import Place, Sight, Wanted, kind_of, look, mounted
from hpc_ckpt.errors import SchedulerError

MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
nas:/home /home nfs4 rw,vers=4.2 0 0
10.0.0.1@o2ib:/scratch /scratch\\040fast lustre rw 0 0
overlay /home/anna/x overlay rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/homes", "ext4"),
        ("/home/anna", "nfs4"),
        ("/home/anna/x/y", "overlay"),
        ("/scratch fast/a", "lustre"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    """The longest mount point that contains it."""
    assert kind == kind_of(path, mounted(MOUNTS))
    assert kind_of(path, []) is None


def refuse(argv: Sequence[str]) -> str:
    raise SchedulerError(argv, 1, "access\ndenied")


def test_places_and_tools(tmp_path: Path) -> None:
    """Variables get their values on the machine; a directory may be made later."""
    (tmp_path / "tool").touch()
    wanted = Wanted(
        root=str(tmp_path),
        storage={"local": "$TMPDIR/x", "unset": "$NO_SUCH", "odd": "${ODD}"},
        tools={"here": "/bin/sh", "plain": str(tmp_path / "tool"), "gone": "/no/such"},
    )
    sight = look(wanted, {"TMPDIR": str(tmp_path), "ODD": "relative"})
    assert (str(tmp_path / "x"), None) == (
        sight.storage["local"].path,
        sight.storage["local"].problem,
    )
    assert "$NO_SUCH is not set" in (sight.storage["unset"].problem or "")
    assert "slash" in (sight.storage["odd"].problem or "")
    assert {"here": "", "plain": "cannot be executed", "gone": "not there"} == sight.tools
    assert (None, None) == (sight.scontrol, sight.sbatch)


def test_slurms_commands_are_tried_where_asked(tmp_path: Path) -> None:
    """Nothing is submitted: --test-only."""
    asked: list[list[str]] = []

    def run(argv: Sequence[str]) -> str:
        asked.append(list(argv))
        return ""

    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "gpu"}
    wanted = Wanted(root=str(tmp_path), slurm=True)
    sight = look(wanted, environ, run)
    assert ("", "") == (sight.scontrol, sight.sbatch)
    assert [True, False] == ["7" in argv for argv in asked]
    assert {"--test-only", "--partition=gpu"} <= set(asked[1])
    refused = look(wanted, environ, refuse)
    assert "sbatch failed (exit code 1): access denied" == refused.sbatch


def test_a_report_survives_its_journey(tmp_path: Path) -> None:
    """From the node to the login node, as one line."""
    wanted = Wanted(root=str(tmp_path), storage={"a": "/tmp"})
    (tmp_path / probe.WANTED_NAME).write_text(json.dumps(dataclasses.asdict(wanted)))
    probe.main(tmp_path)
    (line,) = (tmp_path / probe.SIGHT_NAME).read_text().splitlines()
    sight = Sight.from_record(json.loads(line))
    assert str(tmp_path) == sight.root.path
    assert isinstance(sight.storage["a"], Place)

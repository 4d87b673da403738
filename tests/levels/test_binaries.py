"""What is read from executables: real ones, and headers made for the purpose."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from molecules import require

from hpc_ckpt.levels.base import Work
from hpc_ckpt.levels.binaries import deaf_to_preload, executables, find, launcher_in
from hpc_ckpt.levels.criu import Criu


def elf(path: Path, *kinds: int, bits: int = 2) -> Path:
    """A program of which only the headers are there."""
    head = bytearray(64)
    head[:6] = b"\x7fELF" + bytes((bits, 1))
    struct.pack_into("<Q", head, 32, 64)
    struct.pack_into("<HH", head, 54, 56, len(kinds))
    path.write_bytes(bytes(head) + b"".join(struct.pack("<I", k) + bytes(52) for k in kinds))
    path.chmod(0o755)
    return path


def test_a_dynamic_program_is_fine(tmp_path: Path) -> None:
    assert deaf_to_preload(Path("/bin/true").resolve()) is None
    assert deaf_to_preload(elf(tmp_path / "a", 6, 3, 1)) is None


def test_a_static_program_is_not(tmp_path: Path) -> None:
    assert "statically" in (deaf_to_preload(elf(tmp_path / "a", 1, 1)) or "")


@pytest.mark.parametrize("flag", ["-static", "-static-pie"])
def test_a_static_program_of_a_real_compiler_is_not(tmp_path: Path, flag: str) -> None:
    require("gcc")
    source = tmp_path / "a.c"
    source.write_text("int main(void) { return 0; }\n")
    subprocess.run(["gcc", flag, "-o", tmp_path / "a", source], check=True)
    assert "statically" in (deaf_to_preload(tmp_path / "a") or "")


def test_a_32_bit_program_is_not(tmp_path: Path) -> None:
    assert "32-bit" in (deaf_to_preload(elf(tmp_path / "a", 3, bits=1)) or "")


def test_a_setuid_program_is_not(tmp_path: Path) -> None:
    path = elf(tmp_path / "a", 3)
    path.chmod(0o4755)
    assert "setuid" in (deaf_to_preload(path) or "")


def test_what_cannot_be_read_is_not_held_against_it(tmp_path: Path) -> None:
    assert deaf_to_preload(tmp_path / "none") is None
    cut = elf(tmp_path / "a", 3)
    os.truncate(cut, 64)
    assert deaf_to_preload(cut) is None


def test_scripts_shells_and_env_lead_to_programs(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(f"#!/usr/bin/env -S {sys.executable}\n")
    script.chmod(0o755)
    static = elf(tmp_path / "static", 1)
    assert Path(sys.executable) in executables(["./run.py"], tmp_path, os.environ)
    inside = executables(["bash", "-c", "cd . && ./static 3; ./none"], tmp_path, os.environ)
    assert static in inside
    assert find("./none", tmp_path, os.environ) is None


def test_a_python_text_is_not_read_as_a_shells() -> None:
    assert launcher_in([sys.executable, "-c", "srun = 1"]) is None
    assert "srun" == launcher_in(["bash", "-lc", "srun ./a"])
    assert "mpirun" == launcher_in(["env", "A=1", "bash", "-c", "mpirun ./a"])
    assert "mpirun" == launcher_in(["nice", "-n", "5", "bash", "-o", "pipefail", "-c", "mpirun a"])
    assert "mpirun" == launcher_in(["bash", "-euo", "pipefail", "-c", "mpirun a"])
    assert "mpirun" == launcher_in(["bash", "--rcfile", "x", "-c", "mpirun a"])


@pytest.mark.parametrize(
    "argv", [("mpirun", "-np", "4", "./a"), ("bash", "-c", "cd x && /usr/bin/srun ./a")]
)
def test_criu_does_not_take_what_runs_elsewhere(tmp_path: Path, argv: tuple[str, ...]) -> None:
    """It would save the launcher, and not the processes on other nodes."""
    said = Criu().probe(Work(argv=argv, cwd=tmp_path, environ=dict(os.environ)))
    assert said is not None and "MPI" in said

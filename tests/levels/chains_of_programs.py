"""Programs that know nothing of hpc_ckpt, and chains of them on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hpc_ckpt import events, lease
from hpc_ckpt.levels.program import tree_of
from hpc_ckpt.rundir import RunDir

COUNT_C = r"""
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char **argv) {
    long rounds = atol(argv[1]);
    uint64_t x = 88172645463325252ull;
    FILE *file = fopen("result", "w");
    for (long i = 1; i <= rounds; i++) {
        for (long j = 0; j < 20000000; j++) { x ^= x << 13; x ^= x >> 7; x ^= x << 17; }
        fprintf(file, "%ld %016lx\n", i, (unsigned long) x);
        fflush(file);
        printf("round %ld\n", i);
        fflush(stdout);
    }
    return argc > 2 ? atoi(argv[2]) : 0;
}
"""
# DMTCP knows no descriptor of a symbolic link, and ends the program with code 99.
LINK_C = "#define _GNU_SOURCE\n#include <fcntl.h>\n#include <unistd.h>\n" + COUNT_C.replace(
    "    long rounds", '    close(open("/proc/self/exe", O_PATH | O_NOFOLLOW));\n    long rounds'
)
LOOP_SH = """
sum=0
for ((i = 1; i <= $1; i++)); do
    for ((j = 0; j < 2000; j++)); do sum=$(((sum * 31 + i + j) % 1000003)); done
    echo "$i $sum"
    echo "said $i" >&2
done >> result
"""
NUMPY_PY = """
import sys
import numpy as np
rng = np.random.default_rng(7)
a = rng.standard_normal((300, 300))
with open("result", "w") as file:
    for i in range(int(sys.argv[1])):
        for _ in range(8):
            a = np.tanh(a @ a.T / 300 + rng.standard_normal((300, 300)))
        file.write(f"{i} {float(a.sum()).hex()}\\n")
        file.flush()
"""
TORCH_PY = """
import sys
import torch
torch.manual_seed(7)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
file = open("result", "w")
for i in range(int(sys.argv[1])):
    for _ in range(60):
        x = torch.randn(128, 64)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    file.write(f"{i} {loss.item().hex()}\\n")
    file.flush()
total = sum(p.double().sum().item() for p in model.parameters())
file.write(f"weights {total.hex()}\\n")
"""


def write_program(place: Path, name: str, rounds: int) -> list[str]:
    """The command of a program; it writes `result` into its working directory."""
    if name in ("c", "link"):
        (place / "count.c").write_text(COUNT_C if name == "c" else LINK_C)
        subprocess.run(["gcc", "-O1", "-o", "count", "count.c"], cwd=place, check=True)
        return ["./count", str(rounds)]
    sources = {"bash": LOOP_SH, "numpy": NUMPY_PY, "torch": TORCH_PY}
    path = place / f"program.{'sh' if name == 'bash' else 'py'}"
    path.write_text(sources[name])
    return ["bash" if name == "bash" else sys.executable, path.name, str(rounds)]


def environment(criu: Path | None) -> dict[str, str]:
    path = os.environ["PATH"] if criu is None else f"{criu}{os.pathsep}{os.environ['PATH']}"
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **threads, "PATH": path}


def undisturbed(command: list[str], place: Path) -> str:
    """What it writes if nothing interrupts it."""
    subprocess.run(
        command, cwd=place, env=environment(None), check=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    text = (place / "result").read_text()
    (place / "result").unlink()
    return text


def kill_all(pids: Iterable[int]) -> None:
    """As a power cut does."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it went with its parent
            os.kill(pid, signal.SIGKILL)


class LocalChain:
    """`hpc-ckpt run` in a directory."""

    def __init__(self, place: Path, criu: Path | None) -> None:
        self.place = place
        self.rundir = RunDir(place / "run")
        self._environment = environment(criu)
        self._child: subprocess.Popen[bytes] | None = None

    def start(
        self,
        command: list[str],
        *,
        link_s: float,
        save_s: float = 600,
        level: str = "criu",
        before: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> None:
        words = [
            "run", "--root", "run", "--link-time", f"{link_s:g} s", "--max-links", "12",
            "--policy", f"every {save_s:g} s", "--set", f"level={level}", *more, "--", *command,
        ]  # fmt: skip
        with (self.place / "said").open("wb") as said:
            self._child = subprocess.Popen(
                [*before, sys.executable, "-m", "hpc_ckpt.cli", *words],
                cwd=self.place,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def finish(self, timeout_s: float = 100.0) -> int:
        assert self._child is not None
        return self._child.wait(timeout_s)

    def close(self) -> None:
        if self._child is not None and self._child.poll() is None:
            kill_all(tree_of(self._child.pid))
            self._child.wait()

    def run(self, command: list[str], **how: Any) -> int:
        self.start(command, **how)
        return self.finish()

    def wait_for(self, what: Callable[[], object], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > end:
                raise TimeoutError(self.story())
            time.sleep(0.02)

    def story(self) -> str:
        files = [self.place / "said", *sorted(self.rundir.logs.glob("l*.log"))]
        return "\n".join(f"── {path.name}\n{path.read_text()[-3000:]}" for path in files)

    def link_tree(self, number: int) -> list[int]:
        """Link runner, steward, keepers, program."""
        holder = lease.holder_of(self.rundir, number)
        assert holder is not None
        return tree_of(holder.pid)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [
            record
            for path in sorted(self.rundir.events.glob("*.jsonl"))
            for record in events.read(path)
            if record["event"] == name
        ]

    def levels(self) -> dict[str, Any]:
        return dict(json.loads(self.rundir.levels_file.read_text()))

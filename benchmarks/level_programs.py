"""Four programs that run until they are ended, each with a save and load of its own.

Each makes the file at-work when it is ready. On USR1 it writes restart.dat and goes on; where that
file is there it goes on from it and makes the file gone-on. DMTCP and CRIU save the very same
programs, which then need neither. Two of them can have a Checkpointer.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COUNTER_C = r"""
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
static volatile sig_atomic_t asked;
static void ask(int number) { (void) number; asked = 1; }
int main(void) {
    unsigned long i = 0;
    uint64_t x = 88172645463325252ull;
    signal(SIGUSR1, ask);
    FILE *file = fopen("restart.dat", "r");
    if (file && fscanf(file, "%lu %lx", &i, (unsigned long *) &x) == 2) {
        fclose(file);
        fclose(fopen("gone-on", "w"));
    }
    fclose(fopen("at-work", "w"));
    for (;; i++) {
        for (long j = 0; j < 2000000; j++) { x ^= x << 13; x ^= x >> 7; x ^= x << 17; }
        if (asked) {
            asked = 0;
            file = fopen("restart.new", "w");
            fprintf(file, "%lu %lx\n", i, (unsigned long) x);
            fclose(file);
            rename("restart.new", "restart.dat");
        }
    }
}
"""
LOOP_SH = """
i=0 sum=0
trap 'echo "$i $sum" > restart.new && mv restart.new restart.dat' USR1
if [ -e restart.dat ]; then read -r i sum < restart.dat; : > gone-on; fi
: > at-work
while :; do
    i=$((i + 1))
    for ((j = 0; j < 2000; j++)); do sum=$(((sum * 31 + i + j) % 1000003)); done
done
"""
NUMPY_PY = """
import os, signal
import numpy as np
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
a = np.random.default_rng(7).standard_normal((2000, 2000))
if os.path.exists("restart.dat"):
    with open("restart.dat", "rb") as file:
        a = np.load(file)
    open("gone-on", "w").close()
open("at-work", "w").close()
while True:
    a = np.tanh(a @ a.T / 2000)
    if asked:
        asked.clear()
        with open("restart.new", "wb") as file:
            np.save(file, a)
        os.replace("restart.new", "restart.dat")
"""
NUMPY_MODEL_PY = """
import numpy as np
from hpc_ckpt import Checkpointer
a = np.random.default_rng(7).standard_normal((2000, 2000))
with Checkpointer("run", policy="every 2 s", a=a) as ckpt:
    for _ in ckpt.steps():
        a[:] = np.tanh(a @ a.T / 2000)
        ckpt.step()
"""
TORCH_HEAD = """
import os, signal
import torch
torch.manual_seed(7)
model = torch.nn.Sequential(
    torch.nn.Linear(1024, 2048), torch.nn.Tanh(), torch.nn.Linear(2048, 1024)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def train():
    x = torch.randn(64, 1024)
    loss = torch.nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TORCH_PY = (
    TORCH_HEAD
    + """
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
if os.path.exists("restart.dat"):
    saved = torch.load("restart.dat")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    open("gone-on", "w").close()
open("at-work", "w").close()
while True:
    train()
    if asked:
        asked.clear()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "new")
        os.replace("new", "restart.dat")
"""
)
TORCH_MODEL_PY = (
    TORCH_HEAD
    + """
from hpc_ckpt import Checkpointer
with Checkpointer("run", policy="every 2 s", model=model, optimizer=optimizer) as ckpt:
    for _ in ckpt.steps():
        train()
        ckpt.step()
"""
)
TITLES = {
    "c": "C counter",
    "bash": "bash loop",
    "numpy": "numpy, 2000 × 2000",
    "torch": "PyTorch, 4 million parameters, AdamW",
}
MODELS = {"numpy": NUMPY_MODEL_PY, "torch": TORCH_MODEL_PY}


def write(place: Path, name: str) -> list[str]:
    """The command."""
    if name == "c":
        (place / "counter.c").write_text(COUNTER_C)
        subprocess.run(["gcc", "-O1", "-o", "counter", "counter.c"], cwd=place, check=True)
        return ["./counter"]
    if name == "bash":
        (place / "loop.sh").write_text(LOOP_SH)
        return ["bash", "loop.sh"]
    (place / "program.py").write_text(NUMPY_PY if name == "numpy" else TORCH_PY)
    return [sys.executable, "program.py"]


def write_model(place: Path, name: str) -> list[str]:
    """The same with a Checkpointer."""
    (place / "program.py").write_text(MODELS[name])
    return [sys.executable, "program.py"]

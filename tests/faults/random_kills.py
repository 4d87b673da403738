"""A fork server: each order it reads becomes a training process that it kills at random.

The server has imported torch once, so that a victim lives from its first millisecond on in the
code under test. Orders and answers are JSON lines on stdin and stdout. A victim is a process of
its own; it dies of SIGKILL, sent after a delay or by itself at a kill point.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

from hpc_ckpt import Checkpointer
from hpc_ckpt.testing import ENV_FAULT

KEEP = {"last": 2, "every": 20}
ITEMS = 40_000
"""Floats per piece of state: three pieces and two moments, together 800 kB."""


@dataclass(frozen=True)
class Order:
    """One victim: where it trains, and how it dies."""

    root: str
    log: str
    """Each victim appends what it knows: where it began, and the loss of every step."""
    pause_s: float
    delay_s: float
    """Killed after this long if nothing has killed it before."""
    fault: str = ""
    """HPC_CKPT_FAULT of this victim."""
    steps: int = 0
    """If not 0: leaves after so many steps, in good order, with an exception."""


class EndOfWork(Exception):
    """The program's own reason to leave; it is not complete."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.full((ITEMS,), 0.5), requires_grad=False)
        self.weight = torch.nn.Parameter(torch.zeros(ITEMS))


def train(order: Order) -> None:
    """Every piece of the state says which step it belongs to; the loss depends on all history."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.Adam([model.weight], lr=0.01)
    mark = torch.zeros(ITEMS)
    with (
        Path(order.log).open("a", buffering=1) as log,
        Checkpointer(
            order.root,
            policy="every 1 steps",
            keep=KEEP,
            model=model,
            optimizer=optimizer,
            mark=mark,
        ) as ckpt,
    ):
        began = ckpt.global_step
        print("began", began, file=log)
        for step in ckpt.steps():
            loss = ((model.weight - model.frozen + torch.randn(ITEMS)) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mark.fill_(step + 1)
            print("step", step + 1, loss.item().hex(), file=log)
            ckpt.step(loss=loss)
            if ckpt.global_step - began == order.steps:
                raise EndOfWork
            time.sleep(order.pause_s)


def victim(order: Order) -> None:
    """Never returns: whatever the server would do on its way out is not the victim's."""
    if order.fault:
        os.environ[ENV_FAULT] = order.fault
    try:
        train(order)
    except EndOfWork:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def serve(order: Order) -> dict[str, object]:
    """Let one victim live and die; `timed` says whether the delay killed it."""
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        victim(order)
    watch = os.pidfd_open(child)
    try:
        timed = not select.select([watch], [], [], order.delay_s)[0]
        if timed:
            signal.pidfd_send_signal(watch, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    finally:
        os.close(watch)
    return {"code": os.waitstatus_to_exitcode(status), "timed": timed}


def warm_up() -> None:
    """What torch imports at the first step of an optimizer takes longer than most victims live."""
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.Adam([model.weight])
    model.weight.sum().backward()
    optimizer.step()
    optimizer.state_dict()


def main() -> None:
    warm_up()
    for name in list(os.environ):
        if name.startswith("HPC_CKPT"):
            del os.environ[name]
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(Order(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()

"""Orders that storage did not give in time: where nothing waits behind a link, its job goes back
into the queue all the same, by what the batch script and the environment say of it.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable
from functools import partial

from ..errors import HpcCkptError, SchedulerError
from ..rundir import RunDir
from . import slurm
from .allocation import SlurmBackend
from .arguments import read
from .backend import Cause
from .orders import Orders
from .patience import ToldToStop, by_storage, patiently
from .succession import AWAY_PATIENCE_S, AWAY_RETRY_S

log = logging.getLogger("hpc_ckpt.link")

NOTHING_WAITS = ("requeue", "resubmit")
"""Strategies in which the chain is over with a link that does nothing; otherwise the next token,
or the next job, finds out whether it is better."""


def read_orders(arguments: argparse.Namespace) -> tuple[RunDir, Orders]:
    """The run directory of the chain and its orders, waited for; raises if they do not come."""
    try:
        return patiently(partial(read, arguments.root, arguments.member))
    except ToldToStop:
        _go_on(arguments, told=True)
        raise
    except (HpcCkptError, OSError) as error:
        if by_storage(error):
            _go_on(arguments, told=False)
        raise


def _go_on(arguments: argparse.Namespace, *, told: bool) -> None:
    if arguments.backend == "slurm" and arguments.strategy in NOTHING_WAITS:
        backend = SlurmBackend(os.environ)
        # What somebody cancels is not brought back; and no answer is no fact.
        if not told or backend.look().cause not in (None, Cause.CANCELLED):
            requeue(backend)


def requeue(
    backend: SlurmBackend,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """The last thing such a link does; tried again while the scheduler is away as well."""
    if backend.job is None:
        return
    end = clock() + AWAY_PATIENCE_S
    while True:
        try:
            slurm.requeue(backend.job, backend.run)
        except SchedulerError as error:
            if slurm.is_away(error) and clock() < end:
                sleep(AWAY_RETRY_S)
                continue
            said = " ".join(error.stderr.split())
            log.warning("nothing follows this link: %s; submit the chain again", said)
        return

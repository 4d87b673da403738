"""One checkpoint of DMTCP: under way, waited for, and what its end means."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import errno
import logging
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ..preflight import check_storage
from .base import Moment, NothingNew, NotNow, SaveFailed, StillSaving
from .dmtcp_coordinator import Coordinator
from .dmtcp_files import WrittenFiles
from .dmtcp_images import clear, images_in
from .dmtcp_tool import ASSERTED
from .program import Program

log = logging.getLogger("hpc_ckpt.steward")

BUSY_S = 10.0
"""As long "not in running state" is asked again: a process may just be starting."""
DEATH_S = 3.0
LOOK_EVERY_S = 0.1
TRIES = 3
"""Of a checkpoint that was over before its files could be copied."""
_LATE = b"the checkpoint was not over in time"
_BUSY = b"not in running state"


@dataclass
class Checkpoint:
    """The images come into `place`."""

    coordinator: Coordinator
    command: subprocess.Popen[bytes]
    place: Path
    step: int
    files: WrittenFiles
    began: float
    used_s: float
    """Processor time of the tree at that moment."""
    need: int
    """Bytes, about."""

    def until_whole(self, program: Program, moment: Moment) -> None:
        """Images, and the files of their moment. Raises SaveFailed, NothingNew, StillSaving."""
        for left in reversed(range(TRIES)):
            began = time.monotonic()
            self._until_over(program, moment)
            self._until_written(program, moment)
            if self.files.known():
                return
            now = time.monotonic()
            if now + (now - began) >= moment.until:
                raise NotNow("no time for another checkpoint: files were not copied in this one")
            if left:
                clear(self.place)
                self.command = self.coordinator.checkpoint()
        raise SaveFailed(
            "the program writes files in place, and the checkpoint was over each time before "
            "they could be copied as they were at its moment"
        )

    def _until_over(self, program: Program, moment: Moment) -> None:
        while True:
            self.files.watch(self.command, moment.until)
            code, said = self._answer(moment.until)
            if code == 0:
                return
            busy = _BUSY in said and time.monotonic() < min(moment.until, self.began + BUSY_S)
            if not busy or program.poll() is not None:
                break
            time.sleep(LOOK_EVERY_S)
            self.command = self.coordinator.checkpoint()
        text = said.decode(errors="replace").strip().partition("\n")[0]
        ended = program.wait(time.monotonic() + DEATH_S)
        _check_end(ended)
        if said == _LATE and ended is None:
            raise _unfinished(f"dmtcp_command -bc: {text}, and is still being made")
        fate = "the program goes on" if ended is None else f"the program died ({said_of(ended)})"
        why = f"dmtcp_command -bc: {text or said_of(code)}; {fate}"
        raise SaveFailed(why) if ended is None else self._died(why)

    def _until_written(self, program: Program, moment: Moment) -> None:
        """Release 4.1 answers before the images are there."""
        while True:
            names = images_in(self.place)
            status = self.coordinator.status() if names else None
            if status is not None and status.running:
                return
            code = program.poll()
            if code is not None:
                _check_end(code)
                why = f"the program died ({said_of(code)}) before its images were there"
                raise self._died(why)
            if time.monotonic() >= moment.until:
                why = "dmtcp_command -bc: code 0, but the images were not there in time"
                raise _unfinished(why)
            time.sleep(LOOK_EVERY_S)

    def _answer(self, until: float) -> tuple[int, bytes]:
        try:
            _, said = self.command.communicate(timeout=max(until - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self.command.kill()
            self.command.communicate()
            return -int(signal.SIGKILL), _LATE
        return self.command.returncode, said

    def _died(self, why: str) -> SaveFailed:
        """Others may have taken the space since it was looked at, or a quota was not seen: then
        it is not DMTCP's fault."""
        problem = check_storage(self.place, self.need, 1)
        if problem is None:
            return SaveFailed(why)
        failure = SaveFailed(f"{why}: {problem}")
        failure.__cause__ = OSError(errno.ENOSPC, problem)
        return failure


def said_of(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"


def _unfinished(why: str) -> StillSaving:
    """For want of time: the next save may find more of it."""
    log.warning("not saved: %s", why)
    return StillSaving(why)


def _check_end(code: int | None) -> None:
    """Raises NothingNew where a program has ended in a way of its own."""
    if code is not None and code >= 0 and code != ASSERTED:
        raise NothingNew(f"the program ended with code {code} before it could be saved")

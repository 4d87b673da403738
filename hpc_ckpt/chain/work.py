"""What a link does in its own process, and how it left off. A command is local.py's."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import EXIT_COMPLETE, EXIT_FAILED, EXIT_SAVED, LinkEnded, SpecError


class Work(Protocol):
    """A function call or a command."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def returns(self) -> bool:
        """A function: what it returns is the result, and it is called again for it after DONE."""

    def run(self) -> tuple[int, Any]:
        """An exit code and the result."""

    def abandon(self) -> None:
        """Called from another thread just before this process leaves: nothing may outlive it."""


@dataclass(frozen=True)
class Call:
    """A function with its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    returns: bool = True

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def run(self) -> tuple[int, Any]:
        return EXIT_COMPLETE, self.function(*self.args, **self.kwargs)

    def abandon(self) -> None:
        return  # it ends with the process


@dataclass(frozen=True)
class Ended:
    """How the work left off."""

    code: int
    value: Any = None
    error: BaseException | None = None

    @property
    def by_link_end(self) -> bool:
        return isinstance(self.error, LinkEnded)


def perform(work: Work, told: Mapping[str, str]) -> Ended:
    """Run it with these environment variables; whatever it raises is part of the answer."""
    with _variables(told):
        try:
            return Ended(*work.run())
        except LinkEnded as error:
            return Ended(EXIT_SAVED, error=error)
        except SystemExit as error:
            return Ended(_exit_code(error))
        except BaseException as error:  # noqa: BLE001 - judged first, then raised again
            return Ended(EXIT_FAILED, error=error)


@contextlib.contextmanager
def _variables(told: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return EXIT_COMPLETE
    return error.code if isinstance(error.code, int) else EXIT_FAILED


# ── what was asked for ────────────────────────────────────────────────────────────────────
def check_count(name: str, value: object, *, least: int) -> None:
    right = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if value is not None and not right:
        raise SpecError(f"ChainTask: {name}={value!r}: must be {least} or more, or None")


def words_of(work: object) -> list[str]:
    found = list(work) if isinstance(work, (list, tuple)) else []
    if not found or not all(word and isinstance(word, (str, os.PathLike)) for word in found):
        raise SpecError(f"ChainTask: {work!r} is neither a function nor a list of words")
    return [os.fspath(word) for word in found]

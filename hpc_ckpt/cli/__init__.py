"""The command line: parse → call → print; no logic. Everything heavy is imported when used."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """`hpc-ckpt`. What follows a bare `--` is the user's command, untouched."""
    words = list(sys.argv[1:] if argv is None else argv)
    command: list[str] = []
    if "--" in words:
        cut = words.index("--")
        words, command = words[:cut], words[cut + 1 :]
    sys.exit(_run(words, command))


def _run(words: list[str], command: list[str]) -> int:
    from ..errors import HpcCkptError
    from .app import app

    try:
        code = app(args=words, obj=command, prog_name="hpc-ckpt", standalone_mode=True)
    except HpcCkptError as error:
        print(f"hpc-ckpt: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hpc-ckpt: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141  # the reader of our output left: `hpc-ckpt ls | head`
    except OSError as error:
        print(f"hpc-ckpt: {error.filename or 'storage'}: {error.strerror}", file=sys.stderr)
        return 1
    return code if isinstance(code, int) else 0

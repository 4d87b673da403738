"""Words and moments out of files, fit for a terminal: whoever wrote them may have meant harm."""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from datetime import datetime


def shown(text: str) -> str:
    """What would move the cursor, or cannot be written at all, is escaped."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def moment(unix_s: float, form: str | None = None) -> str:
    """As strftime has it, or in full with the zone; a number where no calendar has it."""
    try:
        local = datetime.fromtimestamp(unix_s).astimezone()
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:g}"
    return local.isoformat(" ", "seconds") if form is None else local.strftime(form)

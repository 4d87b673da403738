"""Why a job is pending, in Slurm's words: which of them pass, and which never do by themselves.

Standard library only: the link runner asks it.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import re

_NOT_ALLOWED = re.compile(
    r"BadConstraints|PartitionTimeLimit|Invalid(?:Account|QOS)|(?:Account|QOS)NotAllowed"
    r"|Reservation(?:Deleted|Invalid)|(?:Assoc|QOS)Max\w+Per(?:Job|Node)|QOSMin"
)
"""It asks for what the site does not give it: by itself that stays so. Limits per user, account or
group free up when other jobs end; PartitionNodeLimit can be nodes that are down."""

_NEVER_BEGINS = re.compile(
    rf"JobHeldAdmin|JobHoldMaxRequeue|requeued[ _]held|DependencyNeverSatisfied"
    rf"|{_NOT_ALLOWED.pattern}",
    re.IGNORECASE,
)
"""Why a job is pending that never begins by itself. One that its user holds is meant to wait."""


def never_begins(reason: str) -> bool:
    """Whether somebody has to do something first, in the words of squeue or scontrol."""
    return _NEVER_BEGINS.search(reason) is not None


def not_allowed(reason: str) -> bool:
    """Whether a job like it would wait for ever as well."""
    return _NOT_ALLOWED.search(reason) is not None

"""Whether an image that lies in a buffer already has the bytes that the program has now.

By digests of the program's own memory, read where it lies: that costs half of a copy, and what
has not changed is then neither copied nor digested again.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import bisect
from collections.abc import Sequence

from ..format.image import ImageLayout
from ..format.manifest import CHUNK, Digester
from ..parallel import Row
from ..state.leaves import view_at

THREADS = 2
"""Training waits, so its cores are free."""


def has_digests(
    layout: ImageLayout,
    addresses: Sequence[int],
    expected: Sequence[str],
    chunk: int = CHUNK,
) -> bool:
    """Whether the file image made of leaves at these addresses has exactly these digests.

    One address for each leaf of the layout, in file order; each is a stretch of host memory that
    nobody writes to meanwhile. Ends at the first chunk that differs.
    """
    if len(expected) != -(-layout.size // chunk):
        return False
    return _Comparison(layout, addresses, expected, chunk).run()


class _Comparison:
    def __init__(
        self, layout: ImageLayout, addresses: Sequence[int], expected: Sequence[str], chunk: int
    ) -> None:
        spans = list(layout.spans.values())
        self._starts = [0, *(start for start, _ in spans)]
        self._pieces = [
            memoryview(layout.header),
            *(
                view_at(address, end - start)
                for address, (start, end) in zip(addresses, spans, strict=True)
            ),
        ]
        self._size = layout.size
        self._chunk = chunk
        self._expected = expected
        self._same = True

    def run(self) -> bool:
        Row(len(self._expected), self._one).run(THREADS)
        return self._same

    def _one(self, number: int) -> None:
        if self._same and self._digest(number) != self._expected[number]:
            self._same = False

    def _digest(self, number: int) -> str:
        low = number * self._chunk
        high = min(low + self._chunk, self._size)
        digester = Digester()
        index = bisect.bisect_right(self._starts, low) - 1
        while low < high:
            start, piece = self._starts[index], self._pieces[index]
            end = min(start + len(piece), high)
            digester.update(piece[low - start : end - start])
            low, index = end, index + 1
        return digester.text()

"""Whether a peer's asynchronous save is a snapshot: is what it wrote what was there at the call?

    python -m benchmarks.torn [GIB_A_TENSOR …]

The tensors are erased as soon as the call returns, as training would change them; what is loaded
afterwards must be what they were before.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

TENSORS = 3
SIZES = (0.1, 0.25, 0.6)


def torchsnapshot_async(tensors: dict[str, torch.Tensor], place: Path) -> tuple[float, bool]:
    """Seconds until the call returned, and whether something else than its moment was saved."""
    from torchsnapshot import Snapshot, StateDict

    before = {name: tensor[0].item() for name, tensor in tensors.items()}
    began = time.perf_counter()
    pending = Snapshot.async_take(str(place), {"state": StateDict(**tensors)})
    blocked = time.perf_counter() - began
    for tensor in tensors.values():
        tensor.zero_()
    snapshot = pending.wait()
    loaded = StateDict(**{name: torch.empty_like(one) for name, one in tensors.items()})
    snapshot.restore({"state": loaded})
    return blocked, any(bool((loaded[name] != value).any()) for name, value in before.items())


def main() -> None:
    for gib in [float(word) for word in sys.argv[1:]] or SIZES:
        elements = round(gib * (1 << 28))
        tensors = {f"t{n}": torch.full((elements,), float(n + 1)) for n in range(TENSORS)}
        with tempfile.TemporaryDirectory() as place:
            blocked, torn = torchsnapshot_async(tensors, Path(place) / "saved")
        verdict = "TORN" if torn else "whole"
        print(f"torchsnapshot.async_take, {gib:g} GiB a tensor: {1000 * blocked:.0f} ms, {verdict}")


if __name__ == "__main__":
    main()

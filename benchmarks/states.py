"""The states that are saved: a model and its Adam state, touched and of random content.

Every contender gets the same bytes in the same pieces. advance() changes every tensor, as a
training step does: nothing may be left out of a save because it did not change.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

GIB = 1 << 30
MEMBERS = ("exp_avg", "exp_avg_sq", "step")
BLOCK = 1 << 24
"""Elements of noise that are drawn; further apart than any compressor looks."""


class Shape(str, Enum):
    """How the bytes are cut into tensors."""

    LARGE = "large"
    MANY = "many"

    @property
    def parameters(self) -> int:
        """Of each parameter Adam keeps three tensors more."""
        return 4 if self is Shape.LARGE else 500


class Flat(Protocol):
    """What a peer needs of a state."""

    def flat(self) -> dict[str, Tensor]: ...

    def advance(self) -> None: ...


@dataclass(frozen=True)
class State:
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def advance(self) -> None:
        """One optimizer step; the gradients are set once."""
        self.optimizer.step()

    def flat(self) -> dict[str, Tensor]:
        """Every tensor by a name of its own."""
        named = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            kept = self.optimizer.state.get(parameter, {})
            named.update((f"optimizer.{name}.{key}", kept[key]) for key in MEMBERS if key in kept)
        return named

    def nested(self) -> dict[str, Any]:
        """As a training script hands it to torch.save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def adopt(self, nested: Mapping[str, Any]) -> None:
        """As a training script takes it from torch.load."""
        self.model.load_state_dict(nested["model"])
        self.optimizer.load_state_dict(nested["optimizer"])

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.flat().values())


def build(gib: float, shape: Shape, *, frozen: float = 0.0) -> State:
    """A state of this size in all; `frozen` is the share of its bytes that is never trained."""
    noise = Noise()
    elements = round(gib * GIB / 4)
    trained = _parameters(round(elements * (1 - frozen) / 3), shape, noise)
    model = nn.ParameterDict({f"p{index:03}": one for index, one in enumerate(trained)})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    if frozen:
        for index, one in enumerate(_parameters(round(elements * frozen), shape, noise)):
            model[f"f{index:03}"] = one.requires_grad_(False)
    _give_gradients(trained)
    state = State(model, optimizer)
    state.advance()
    for kept in state.optimizer.state.values():
        noise.fill(kept["exp_avg"])
        noise.fill(kept["exp_avg_sq"]).square_()
    return state


def without_moments(state: State) -> State:
    """The same model with an optimizer that has never stepped, as a program that starts has."""
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    return State(state.model, torch.optim.Adam(parameters, lr=1e-4, fused=True))


class Noise:
    """Random content by the block: drawing 4 GiB of it would take longer than any save."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._block = torch.randn(BLOCK)
        self._at = 0

    def fill(self, tensor: Tensor) -> Tensor:
        """Each tensor begins elsewhere in the block."""
        flat, done = tensor.view(-1), 0
        while done < len(flat):
            length = min(len(flat) - done, BLOCK - self._at)
            flat[done : done + length] = self._block[self._at : self._at + length]
            done, self._at = done + length, (self._at + length + 1) % BLOCK
        return tensor


def _parameters(elements: int, shape: Shape, noise: Noise) -> list[nn.Parameter]:
    each = elements // shape.parameters
    return [nn.Parameter(noise.fill(torch.empty(each))) for _ in range(shape.parameters)]


def _give_gradients(parameters: list[nn.Parameter]) -> None:
    """One gradient for all, so that it does not count as memory of the state."""
    gradient = torch.empty_like(parameters[0]).normal_()
    for parameter in parameters:
        parameter.grad = gradient


def tensors(count: int) -> dict[str, Tensor]:
    """That many tensors of one element."""
    return {f"t{index:06}": value for index, value in enumerate(torch.randn(count, 1).unbind())}


def views(named: Mapping[str, Tensor]) -> list[np.ndarray]:
    """The bytes of each tensor, without a copy."""
    return [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in named.values()]


def copy_into(named: Mapping[str, Tensor], loaded: Mapping[str, Any]) -> None:
    """Fill the tensors in place."""
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(torch.as_tensor(loaded[name]))


def erase(named: Mapping[str, Tensor]) -> None:
    """So that a load that fills nothing is found out."""
    for view in views(named):
        view.fill(0)


def digest(named: Mapping[str, Tensor]) -> str:
    seen = xxhash.xxh3_64()
    for name in sorted(named):
        (view,) = views({name: named[name]})
        seen.update(view.data)
    return seen.hexdigest()

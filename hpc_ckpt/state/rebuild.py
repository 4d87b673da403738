"""torch's tags, read: allocates on the CPU, fills, and moves to the right device.

The device is the one that map_location, the tracked object or the checkpoint names, in that
order. Every part is checked before torch sees it; what torch still refuses names its place.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch

from ..errors import UserError
from .leaves import Read, copy_into, fill, identity, identity_of_leaf, leaf_bytes
from .plain import Node, broken, floating, integer, integers, newer, record, shape_of, text
from .tensors import COMPRESSED, DTYPES, name_of, packed_size, raw_bytes

MapLocation = str | torch.device | Mapping[str, Any] | Callable[[Any, str], Any] | None
"""As for torch.load: a device for all, devices by their saved names, or who is asked."""
_T = TypeVar("_T")

_QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
_CPU = torch.device("cpu")
_FIELDS, _OPTIONAL = "leaf dtype shape", "tied device order"


class TensorReader:
    """Rebuilds tensors; tied leaves come back as one object."""

    def __init__(
        self,
        read: Read,
        map_location: MapLocation,
        copy: bool,
        own: Mapping[str, torch.Tensor],
    ) -> None:
        self._read = read
        self._located = _located(map_location)
        self._copy = copy
        self._own = own
        self._seen: dict[Hashable, torch.Tensor] = {}

    def tensor(self, node: Node, path: str, like: object) -> torch.Tensor:
        fields = record(node, path, _FIELDS, _OPTIONAL)
        own = self._own.get(text(fields["leaf"], path))
        if own is not None:
            return own
        return self._once(
            identity_of_leaf(fields, path),
            lambda: self._place(self._strided(fields, path), fields.get("device"), path, like),
        )

    def _once(self, key: Hashable, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._seen:
            self._seen[key] = build()
        return self._seen[key]

    def _place(self, value: torch.Tensor, saved: Node, path: str, like: object) -> torch.Tensor:
        device = self._device(value, saved, path, like)
        value = value if device is _CPU else value.to(device)
        if type(like) is not torch.nn.Parameter:
            return value
        differentiable = value.is_floating_point() or value.is_complex()
        return torch.nn.Parameter(value, requires_grad=like.requires_grad and differentiable)

    def _device(self, value: torch.Tensor, saved: Node, path: str, like: object) -> torch.device:
        asked = self._located(value, "cpu" if saved is None else text(saved, path))
        if asked is not None:
            return asked
        if isinstance(like, torch.Tensor) and not like.is_meta:
            return _CPU if like.is_cpu else like.device
        device = _CPU if saved is None else decode_device(saved, path)
        return device if _available(device) else _CPU

    def _strided(self, fields: dict[str, Node], path: str) -> torch.Tensor:
        dtype = decode_dtype(fields["dtype"], path)
        if fields["dtype"] in _QUANTIZED:
            raise broken(path, "a quantised tensor needs its own tag")
        shape = shape_of(fields["shape"], path)
        nbytes = math.prod(shape) * dtype.itemsize
        data = leaf_bytes(self._read, fields["leaf"], path, nbytes)
        odd = dtype is torch.complex32  # silence costs more than a small tensor
        if not self._copy and "order" not in fields and not data.readonly and nbytes:
            return _built(path, lambda: _over(data, dtype, shape), quietly=odd)
        order = _checked_order(fields.get("order"), len(shape), path)
        value = _built(path, lambda: _empty(shape, dtype, order), quietly=odd)
        _built(path, lambda: fill(value, data), quietly=odd)
        return value

    def _part(self, fields: dict[str, Node], name: str, path: str) -> torch.Tensor:
        inner = f"{path}.{name}"
        return self._strided(record(fields[name], inner, _FIELDS, _OPTIONAL), inner)

    def sparse(self, node: Node, path: str, like: object) -> torch.Tensor:
        return self._once(identity(node), lambda: self._sparse(node, path, like))

    def _sparse(self, node: Node, path: str, like: object) -> torch.Tensor:
        layout = node.get("layout") if type(node) is dict else None
        if layout == "coo":
            value = self._coo(record(node, path, "layout shape coalesced indices values"), path)
        elif type(layout) is str and layout in COMPRESSED:
            value = self._compressed(layout, node, path)
        else:
            raise broken(path, f"unknown sparse layout {layout!r}")
        return self._place(value, node["values"].get("device"), path, like)

    def _coo(self, fields: dict[str, Node], path: str) -> torch.Tensor:
        if type(fields["coalesced"]) is not bool:
            raise broken(path, "'coalesced' is true or false")
        shape = shape_of(fields["shape"], path)
        indices, values = self._part(fields, "indices", path), self._part(fields, "values", path)
        return _built(
            path,
            lambda: torch.sparse_coo_tensor(
                indices,
                values,
                shape,
                check_invariants=True,
                is_coalesced=fields["coalesced"],
            ),
        )

    def _compressed(self, name: str, node: Node, path: str) -> torch.Tensor:
        layout, outer, inner = COMPRESSED[name]
        parts = (outer, inner, "values")
        fields = record(node, path, f"layout shape {' '.join(parts)}")
        shape = shape_of(fields["shape"], path)
        rows, columns, values = (self._part(fields, part, path) for part in parts)
        return _built(
            path,
            lambda: torch.sparse_compressed_tensor(
                rows, columns, values, shape, layout=layout, check_invariants=True
            ),
        )

    def quantized(self, node: Node, path: str, like: object) -> torch.Tensor:
        return self._once(identity(node), lambda: self._quantized(node, path, like))

    def _quantized(self, node: Node, path: str, like: object) -> torch.Tensor:
        optional = "scale zero_point scales zero_points axis"
        fields = record(node, path, "dtype shape data", optional)
        dtype, shape = decode_dtype(fields["dtype"], path), shape_of(fields["shape"], path)
        if name_of(dtype) not in _QUANTIZED:
            raise broken(path, f"{dtype} is not a quantised dtype")
        raw = self._part(fields, "data", path)
        need = packed_size(name_of(dtype), math.prod(shape), dtype.itemsize)
        if raw.dtype is not torch.uint8 or raw.numel() != need:
            raise broken(path, f"a quantised tensor of this shape has {need} bytes")
        value = self._unfilled(fields, shape, dtype, path)
        _built(path, lambda: copy_into(raw_bytes(value, need).numpy().data, raw))
        return self._place(value, fields["data"].get("device"), path, like)

    def _unfilled(
        self, fields: dict[str, Node], shape: tuple[int, ...], dtype: torch.dtype, path: str
    ) -> torch.Tensor:
        if "scale" in fields:
            exact = record(fields, path, "dtype shape data scale zero_point")
            scale, zero = floating(exact["scale"], path), integer(exact["zero_point"], path)
            return _built(
                path,
                lambda: torch._empty_affine_quantized(
                    shape, scale=scale, zero_point=zero, dtype=dtype
                ),
            )
        exact = record(fields, path, "dtype shape data scales zero_points axis")
        scales, zeros = self._part(exact, "scales", path), self._part(exact, "zero_points", path)
        axis = integer(exact["axis"], path)
        if not 0 <= axis < len(shape) or {scales.shape, zeros.shape} != {shape[axis : axis + 1]}:
            raise broken(path, "one scale and zero point per channel were expected")
        return _built(
            path,
            lambda: torch._empty_per_channel_affine_quantized(
                shape, scales=scales, zero_points=zeros, axis=axis, dtype=dtype
            ),
        )

    def generator(self, node: Node, path: str) -> torch.Generator:
        fields = record(node, path, "device state")
        device = decode_device(fields["device"], path)
        state = self._part(fields, "state", path)
        return _built(path, lambda: _generator(device, state))


def _generator(device: torch.device, state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator(device if _available(device) else "cpu")
    return generator.set_state(state)


def _over(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, order: list[int]) -> torch.Tensor:
    if order == sorted(order):
        return torch.empty(shape, dtype=dtype, device=_CPU)
    outer_first = torch.empty([shape[dim] for dim in order], dtype=dtype, device=_CPU)
    return outer_first.permute([order.index(dim) for dim in range(len(order))])


def _checked_order(node: Node, ndim: int, path: str) -> list[int]:
    if node is None:
        return list(range(ndim))
    order = integers(node, path)
    if sorted(order) != list(range(ndim)):
        raise broken(path, "the order of dimensions is not a permutation")
    return order


def _built(path: str, build: Callable[[], _T], *, quietly: bool = True) -> _T:
    """What torch makes of checked parts; its refusals name the place."""
    try:
        if not quietly:
            return build()
        # torch warns once per process that sparse, quantised and half-complex tensors are
        # new or old; the program made such tensors itself and knows.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build()
    except (RuntimeError, ValueError, TypeError, IndexError, OverflowError) as error:
        raise broken(path, f"torch refuses it: {error}") from None


def decode_dtype(node: Node, path: str) -> torch.dtype:
    if text(node, path) not in DTYPES:
        raise newer(path, f"this torch has no dtype {node[:40]!r}")
    return DTYPES[node]


def decode_device(node: Node, path: str) -> torch.device:
    try:
        return torch.device(text(node, path))
    except (RuntimeError, ValueError) as error:
        raise broken(path, f"not a device: {error}") from None


def decode_size(node: Node, path: str) -> torch.Size:
    sizes = integers(node, path)
    if any(not -(2**63) <= size < 2**63 for size in sizes):
        raise broken(path, "a size is a 64-bit integer")
    return torch.Size(sizes)


def _located(map_location: Any) -> Callable[[torch.Tensor, str], torch.device | None]:
    """Where a tensor that was saved on a device of this name shall be; None: nobody says."""
    if map_location is None:
        return lambda value, saved: None
    if isinstance(map_location, Mapping):
        wanted = {str(key): _device_named(name) for key, name in map_location.items()}
        return lambda value, saved: wanted.get(saved)
    if isinstance(map_location, (str, torch.device)):
        everywhere = _device_named(map_location)
        return lambda value, saved: everywhere
    if callable(map_location):
        return lambda value, saved: _device_of(map_location(_storage_of(value), saved))
    raise UserError(
        f"map_location={map_location!r}: give a device, its name, a dict of names, a function of "
        "(storage, name), or None"
    )


def _storage_of(value: torch.Tensor) -> Any:
    strided = value.layout is torch.strided
    parts = value if strided else torch.empty(0, dtype=value.dtype, device=_CPU)
    return parts.untyped_storage()


def _device_of(storage: Any) -> torch.device | None:
    if storage is None:
        return None
    device = getattr(storage, "device", None)
    if not isinstance(device, torch.device):
        raise UserError(f"map_location() returned {type(storage).__name__}, not a storage or None")
    return device


def _device_named(name: Any) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"map_location: {name!r} is not a device: {error}") from None
    return _CPU if device == _CPU else device


def _available(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator() if _has_accelerator() else None
    if accelerator is None or accelerator.type != device.type:
        return False
    return (device.index or 0) < torch.accelerator.device_count()


def _has_accelerator() -> bool:
    return torch.accelerator.is_available()

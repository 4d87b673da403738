"""torch's tags, written: tensors of every dtype and layout, generators.

Keeps references only; leaves.py copies, rebuild.py reads.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import torch

from ..errors import UnsupportedState
from .leaves import LeafBook
from .plain import Node, encode_float, refuse

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES.values()}
_STORED = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name → safetensors'. A dtype that is not here is stored as U8."""

_SUB_BYTE = {"quint4x2": 2, "quint2x4": 4}
COMPRESSED: dict[str, tuple[torch.layout, str, str]] = {
    "csr": (torch.sparse_csr, "crow_indices", "col_indices"),
    "csc": (torch.sparse_csc, "ccol_indices", "row_indices"),
    "bsr": (torch.sparse_bsr, "crow_indices", "col_indices"),
    "bsc": (torch.sparse_bsc, "ccol_indices", "row_indices"),
}
_LAYOUTS = {layout: name for name, (layout, _, _) in COMPRESSED.items()}


def name_of(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def is_flat(value: torch.Tensor) -> bool:
    """Whether the tensor is one leaf; others are built of several parts."""
    return value.layout is torch.strided and not value.is_quantized


# ── writing ───────────────────────────────────────────────────────────────────────────────
def encode_tensor(value: torch.Tensor, path: str, book: LeafBook) -> Node:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        refuse(value, path)
    if value.device.type == "meta":
        raise UnsupportedState(path, "a tensor on the meta device has no data to save")
    if value.is_nested:
        raise UnsupportedState(path, "a nested tensor; save its values and lengths instead")
    if value.layout is torch.sparse_coo:
        return _encode_coo(value, path, book)
    if value.layout in _LAYOUTS:
        return _encode_compressed(value, path, book)
    if value.layout is not torch.strided:
        raise UnsupportedState(path, f"a tensor of layout {value.layout}; convert it to strided")
    if value.is_quantized:
        return _encode_quantized(value, path, book)
    return {"$tensor": _encode_strided(value, path, book)}


def _encode_strided(value: torch.Tensor, path: str, book: LeafBook) -> dict[str, Node]:
    if value.untyped_storage().nbytes() < _extent(value):
        raise UnsupportedState(
            path, "a tensor whose storage was freed or made smaller; save while it has its data"
        )
    name, shape, nbytes = name_of(value.dtype), tuple(value.shape), value.nbytes
    stored = (_STORED[name], shape, nbytes) if name in _STORED else ("U8", (nbytes,), nbytes)
    fields = book.add(path, value, stored, _tie(value))
    fields |= {"dtype": name, "shape": list(shape)}
    if value.device.type != "cpu":
        fields["device"] = str(value.device)
    order = _dim_order(value)
    if order is not None:
        fields["order"] = order
    return fields


def _extent(value: torch.Tensor) -> int:
    """Bytes of its storage up to its last element: what is behind them is not its own."""
    if value.numel() == 0:
        return 0
    steps = zip(value.shape, value.stride(), strict=True)
    last = value.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return int(last + 1) * value.element_size()


def _tie(value: torch.Tensor) -> tuple[object, ...]:
    place = (value.device, value.data_ptr(), value.dtype)
    return (*place, value.shape, value.stride(), value.is_conj(), value.is_neg())


def _dim_order(value: torch.Tensor) -> list[int] | None:
    """Dimensions from outer to inner in memory if dense but not C order (channels last).

    Fused optimizers refuse state whose strides differ from the parameter's.
    """
    if value.is_contiguous():
        return None
    stride = value.stride()
    order = sorted(range(value.ndim), key=lambda dim: (-stride[dim], dim))
    return order if value.permute(order).is_contiguous() else None


def _encode_coo(value: torch.Tensor, path: str, book: LeafBook) -> Node:
    value = value.detach()
    parts = {
        "indices": _encode_strided(value._indices(), f"{path}.indices", book),
        "values": _encode_strided(value._values(), f"{path}.values", book),
    }
    shape, coalesced = list(value.shape), value.is_coalesced()
    return {"$sparse": {"layout": "coo", "shape": shape, "coalesced": coalesced, **parts}}


def _encode_compressed(value: torch.Tensor, path: str, book: LeafBook) -> Node:
    value = value.detach()
    name = _LAYOUTS[value.layout]
    _, compressed, plain = COMPRESSED[name]
    parts = {
        part: _encode_strided(getattr(value, part)(), f"{path}.{part}", book)
        for part in (compressed, plain, "values")
    }
    return {"$sparse": {"layout": name, "shape": list(value.shape), **parts}}


def _encode_quantized(value: torch.Tensor, path: str, book: LeafBook) -> Node:
    name = name_of(value.dtype)
    if name in _SUB_BYTE and (value.storage_offset() or not value.is_contiguous()):
        raise UnsupportedState(path, f"a view of a {name} tensor; clone() it first")
    whole = value.detach().contiguous()
    nbytes = packed_size(name, whole.numel(), whole.element_size())
    return {
        "$quantized": {
            "dtype": name,
            "shape": list(value.shape),
            "data": _encode_strided(raw_bytes(whole, nbytes), path, book),
            **_quantizer(value, path, book),
        }
    }


def _quantizer(value: torch.Tensor, path: str, book: LeafBook) -> dict[str, Node]:
    if value.qscheme() is torch.per_tensor_affine:
        return {"scale": encode_float(value.q_scale()), "zero_point": value.q_zero_point()}
    scales, zeros = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    return {
        "scales": _encode_strided(scales, f"{path}.scales", book),
        "zero_points": _encode_strided(zeros, f"{path}.zero_points", book),
        "axis": value.q_per_channel_axis(),
    }


def raw_bytes(value: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The bytes of a contiguous quantised tensor, as a view."""
    start = value.storage_offset() * value.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=value.device)
    return raw.set_(value.untyped_storage(), start, (nbytes,), (1,))


def packed_size(name: str, numel: int, item: int) -> int:
    per_byte = _SUB_BYTE.get(name)
    return -(-numel // per_byte) if per_byte else numel * item


def encode_generator(value: torch.Generator, path: str, book: LeafBook) -> Node:
    state = _encode_strided(value.get_state(), path, book)
    return {"$generator": {"device": str(value.device), "state": state}}

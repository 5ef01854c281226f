"""The bytes of a tensor as one dense block, without ever interpreting them.

A tensor whose elements fill their memory without gaps (any permutation of the dimensions) is its own block. Expanded
dimensions count once. A view with gaps becomes a contiguous copy of what it shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gemini_ft.contracts.errors import StateError

__all__ = [
    "BlockLayout",
    "block_layout",
    "copy_values",
    "dense_block",
    "is_writable",
    "raw_bytes",
    "refuse_unsupported",
    "span_bytes",
    "view_as",
]

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
# Many dtypes have no copy kernel; elements are moved as these, which have the same size.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a tensor lies in its block: strides in elements, 0 where it is expanded. Dense: its memory is the block."""

    strides: tuple[int, ...]
    num_bytes: int
    dense: bool


def refuse_unsupported(tensor: torch.Tensor, path: str, *, allow_meta: bool = False) -> None:
    """Raise StateError, naming `path`, when the bytes of `tensor` cannot be kept."""
    kind = type(tensor)
    if kind not in _PLAIN_TYPES:
        why = f"is a {kind.__module__}.{kind.__qualname__}; give its plain local tensor, as the adapters do"
    elif tensor.layout is not torch.strided:
        why = f"has layout {tensor.layout}; only strided tensors are kept"
    elif tensor.dtype in _QUANTIZED:
        why = f"has the quantized dtype {tensor.dtype}; give int_repr(), scales and zero points"
    elif tensor.is_meta:
        if allow_meta:
            return
        why = "is on the meta device and has no bytes; materialize it first"
    elif tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        why = "has no memory now: its storage was freed, as sharded modules do; use the adapter of the framework"
    else:
        return
    raise StateError(f"tensor {path} {why}", path=path)


def _expanded(tensor: torch.Tensor) -> list[bool]:
    return [size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (stride, size) of the dimensions along which memory is walked, innermost first."""
    steps = zip(tensor.stride(), tensor.shape, strict=True)
    return sorted((stride, size) for stride, size in steps if size > 1 and stride)


def block_layout(tensor: torch.Tensor) -> BlockLayout:
    """Return how `tensor` lies in its block."""
    if tensor.is_contiguous():  # by far the most, and this is asked for every tensor at every step
        return BlockLayout(tuple(tensor.stride()), tensor.nbytes, True)
    num_elements, dense = 1, True
    for stride, size in _steps(tensor):
        dense = dense and stride == num_elements
        num_elements *= size
    strides = tuple(tensor.stride()) if dense else _contiguous_strides(tensor)
    return BlockLayout(strides, num_elements * tensor.element_size(), dense)


def _contiguous_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size, expanded in zip(reversed(tensor.shape), reversed(_expanded(tensor)), strict=True):
        strides.append(0 if expanded else step)
        step *= 1 if expanded else size
    return tuple(reversed(strides))


def span_bytes(tensor: torch.Tensor) -> int:
    """Return the distance in bytes from the first element of `tensor` to the end of its last."""
    return tensor.element_size() * (1 + sum((size - 1) * stride for stride, size in _steps(tensor)))


def is_writable(tensor: torch.Tensor) -> bool:
    """True when no two elements of `tensor` share memory, expanded dimensions aside."""
    reach = 0
    for stride, size in _steps(tensor):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def _carrier(tensor: torch.Tensor, expanded: list[bool]) -> torch.Tensor:
    shape = [1 if hidden else size for size, hidden in zip(tensor.shape, expanded, strict=True)]
    carrier = torch.empty(0, dtype=_CARRIERS[tensor.element_size()], device=tensor.device)
    return carrier.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, tensor.stride())


def copy_values(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy element by element; False when the memory of `target` cannot hold the values of `source`."""
    hidden = _expanded(target)
    if not is_writable(target) or any(h and not s for h, s in zip(hidden, _expanded(source), strict=True)):
        return False
    _carrier(target, hidden).copy_(_carrier(source, hidden))
    return True


def dense_block(tensor: torch.Tensor) -> torch.Tensor:
    """Return the block of `tensor` as uint8; it shares memory with a dense tensor and is a copy of another."""
    layout = block_layout(tensor)
    if not layout.dense:
        tensor = _carrier(tensor, _expanded(tensor)).clone(memory_format=torch.contiguous_format)
    return raw_bytes(tensor, layout.num_bytes)


def raw_bytes(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Return `num_bytes` of the memory of `tensor`, from its first element on, as a uint8 view of it."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    offset = tensor.storage_offset() * tensor.element_size()
    return view.set_(tensor.untyped_storage(), offset, (num_bytes,), (1,))


def view_as(block: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Return a typed view of a uint8 block."""
    typed = block.view(dtype)
    return typed.as_strided(shape, strides, typed.storage_offset())

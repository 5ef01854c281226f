"""Everything in a state that is not a tensor, as JSON, exactly; tensors are left as numbered holes.

JSON's own types stand for themselves. Whatever JSON would bend (tuples, bytes, NaN, integer keys, ...) is an object
with the key `$`. No pickle: what is not listed here is refused by name and path.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gemini_ft.contracts.errors import StateError

__all__ = ["Path", "decode", "encode", "join"]

Path = tuple[str, ...]

_TAG = "$"
_MAX_DEPTH = 100
_INLINE_ARRAY_BYTES = 256
_PLAIN_KEY = re.compile(r"(?!-?[0-9]+$)[A-Za-z0-9_.\-]+")
_KEPT = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict, torch.Size, torch.dtype, numpy values and tensors"
)


def join(path: Path) -> str:
    """Return the printed form of a path, unique within a state: `optimizer/state/0/exp_avg`."""
    return "/".join(path)


def encode(value: Any, path: Path, hole: Callable[[Path, torch.Tensor], int]) -> Any:
    """Return the JSON form of `value`; `hole` takes each tensor and returns its number.

    Raises:
        StateError: something in `value` cannot be kept; the sentence names its path and type.
    """
    if len(path) > _MAX_DEPTH:
        raise StateError(
            f"state {join(path[:4])}/... is nested deeper than {_MAX_DEPTH} levels; does it contain itself?",
            path=join(path),
        )
    if value is None or isinstance(value, torch.Tensor):
        return None if value is None else {_TAG: "tensor", "v": hole(path, value)}
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, path, hole)
    if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.fields is None:
        return {_TAG: "npscalar", "dtype": value.dtype.str, "v": _b64(value.tobytes())}
    raise StateError(
        f"state {join(path)} is a {type(value).__module__}.{type(value).__qualname__}, which Gemini-FT does not keep "
        f"(it keeps {_KEPT}); convert it in state_dict()",
        path=join(path),
    )


def decode(node: Any, tensor_of: Callable[[int], torch.Tensor]) -> Any:
    """Return the value whose JSON form is `node`; `tensor_of` fills the holes.

    Raises:
        StateError: `node` was not written by `encode`.
    """
    if isinstance(node, list):
        return [decode(item, tensor_of) for item in node]
    if not isinstance(node, dict):
        return node
    if _TAG not in node:
        return {key: decode(item, tensor_of) for key, item in node.items()}
    decoder = _DECODERS.get(node[_TAG])
    if decoder is None:
        raise StateError(f"the manifest holds a value of the unknown kind {node[_TAG]!r}", path="")
    return decoder(node, tensor_of)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _step(path: Path, key: str | int) -> Path:
    return (*path, str(key) if isinstance(key, int) else _printed(key))


@lru_cache(maxsize=1 << 16)
def _printed(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else json.dumps(key)


def _items(value: list[Any] | tuple[Any, ...], path: Path, hole: Any) -> list[Any]:
    return [encode(item, _step(path, i), hole) for i, item in enumerate(value)]


def _encode_int(value: int, path: Path, hole: Any) -> Any:
    return value if -(1 << 63) <= value < 1 << 63 else {_TAG: "int", "v": hex(value)}


def _encode_float(value: float, path: Path, hole: Any) -> Any:
    return value if math.isfinite(value) else {_TAG: "float", "v": struct.pack(">d", value).hex()}


def _encode_complex(value: complex, path: Path, hole: Any) -> Any:
    return {_TAG: "complex", "v": struct.pack(">2d", value.real, value.imag).hex()}


def _encode_dict(value: dict[Any, Any], path: Path, hole: Any) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise StateError(
                f"state {join(path)} has the key {key!r} of type {type(key).__name__}; keys must be str or int",
                path=join(path),
            )
    plain = type(value) is dict and all(type(key) is str and not key.startswith(_TAG) for key in value)
    if plain:
        return {key: encode(item, _step(path, key), hole) for key, item in value.items()}
    items = [[_encode_key(key), encode(item, _step(path, key), hole)] for key, item in value.items()]
    if type(value) is dict:
        return {_TAG: "dict", "v": items}
    # torch modules hang their version numbers on the OrderedDict, and load_state_dict reads them.
    metadata = getattr(value, "_metadata", None)
    return {_TAG: "odict", "v": items, "metadata": encode(metadata, (*path, "_metadata"), hole)}


def _encode_key(key: str | int) -> Any:
    return _encode_int(key, (), None) if isinstance(key, int) else key


def _encode_array(value: np.ndarray[Any, Any], path: Path, hole: Callable[[Path, torch.Tensor], int]) -> Any:
    if value.dtype.hasobject or value.dtype.fields is not None:
        raise StateError(
            f"state {join(path)} is a numpy array of dtype {value.dtype}; only plain element types are kept",
            path=join(path),
        )
    order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    data = value.tobytes("F" if order == "F" else "C")
    node = {_TAG: "nparray", "dtype": value.dtype.str, "shape": list(value.shape), "order": order}
    if len(data) <= _INLINE_ARRAY_BYTES:
        return {**node, "v": _b64(data)}
    copy = torch.empty(len(data), dtype=torch.uint8)
    copy.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return {**node, "tensor": hole(path, copy)}


_ENCODERS: dict[type, Callable[[Any, Path, Any], Any]] = {
    bool: lambda value, path, hole: value,
    str: lambda value, path, hole: value,
    int: _encode_int,
    float: _encode_float,
    complex: _encode_complex,
    bytes: lambda value, path, hole: {_TAG: "bytes", "v": _b64(value)},
    bytearray: lambda value, path, hole: {_TAG: "bytearray", "v": _b64(bytes(value))},
    list: _items,
    tuple: lambda value, path, hole: {_TAG: "tuple", "v": _items(value, path, hole)},
    torch.Size: lambda value, path, hole: {_TAG: "size", "v": list(value)},
    torch.dtype: lambda value, path, hole: {_TAG: "dtype", "v": str(value).removeprefix("torch.")},
    torch.device: lambda value, path, hole: {_TAG: "device", "v": str(value)},
    dict: _encode_dict,
    OrderedDict: _encode_dict,
    np.ndarray: _encode_array,
}


def _decode_dict(node: Any, tensor_of: Any) -> dict[Any, Any]:
    return {decode(key, tensor_of): decode(item, tensor_of) for key, item in node["v"]}


def _decode_odict(node: Any, tensor_of: Any) -> OrderedDict[Any, Any]:
    value = OrderedDict(_decode_dict(node, tensor_of))
    if node["metadata"] is not None:
        value._metadata = decode(node["metadata"], tensor_of)  # type: ignore[attr-defined]
    return value


def _decode_array(node: Any, tensor_of: Any) -> np.ndarray[Any, Any]:
    data = tensor_of(node["tensor"]).numpy().tobytes() if "tensor" in node else base64.b64decode(node["v"])
    flat = np.frombuffer(data, dtype=np.dtype(node["dtype"])).copy()
    return flat.reshape(tuple(node["shape"]), order=node["order"])


def _decode_dtype(node: Any, tensor_of: Any) -> torch.dtype:
    dtype = getattr(torch, node["v"], None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"the manifest names the unknown torch dtype {node['v']!r}", path="")
    return dtype


_DECODERS: dict[str, Callable[[Any, Any], Any]] = {
    "tensor": lambda node, tensor_of: tensor_of(node["v"]),
    "int": lambda node, tensor_of: int(node["v"], 16),
    "float": lambda node, tensor_of: struct.unpack(">d", bytes.fromhex(node["v"]))[0],
    "complex": lambda node, tensor_of: complex(*struct.unpack(">2d", bytes.fromhex(node["v"]))),
    "bytes": lambda node, tensor_of: base64.b64decode(node["v"]),
    "bytearray": lambda node, tensor_of: bytearray(base64.b64decode(node["v"])),
    "tuple": lambda node, tensor_of: tuple(decode(item, tensor_of) for item in node["v"]),
    "size": lambda node, tensor_of: torch.Size(node["v"]),
    "dtype": _decode_dtype,
    "device": lambda node, tensor_of: torch.device(node["v"]),
    "dict": _decode_dict,
    "odict": _decode_odict,
    "nparray": _decode_array,
    "npscalar": lambda node, tensor_of: np.frombuffer(base64.b64decode(node["v"]), dtype=np.dtype(node["dtype"]))[0],
}

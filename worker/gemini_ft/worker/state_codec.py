"""A state of named parts, flattened into a JSON-able skeleton and a table of tensors, and put back.

Rules for tensors: every dtype and layout comes back bit for bit, with its strides. A small view of a large storage
costs what it shows. Tensors that show the same bytes are kept once and share memory again when loaded. Tensors that
overlap in part are kept one by one, and `FlatState.overlaps` names them. A view with gaps is loaded into the live view,
or else as a contiguous tensor. Conjugate and negative bits are resolved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import xxhash
from pydantic import BaseModel, ConfigDict

from gemini_ft.contracts.errors import StateError
from gemini_ft.worker import _skeleton
from gemini_ft.worker._blocks import (
    block_layout,
    copy_values,
    raw_bytes,
    refuse_unsupported,
    span_bytes,
    view_as,
)

__all__ = ["FlatState", "Layout", "Manifest", "TensorSpec", "check_match", "flatten", "unflatten"]

FillBlock = Callable[[int, torch.Tensor], None]
"""Called with the index of a tensor and a uint8 tensor to fill with the bytes of its block."""


class TensorSpec(BaseModel):
    """One tensor of a state. Its block has `num_bytes`; with `alias_of`, the block is that of an earlier tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    num_bytes: int
    alias_of: int | None = None


class Layout(BaseModel):
    """Identifies names, dtypes, shapes, strides and aliases of a state; equal digests mean an equal table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    num_tensors: int
    num_bytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Layout:
        """Return the layout of a table of tensors."""
        hasher, num_tensors, num_bytes = xxhash.xxh3_128(), 0, 0
        for spec in specs:
            facts = (spec.path, spec.dtype, spec.shape, spec.strides, spec.num_bytes, spec.alias_of)
            hasher.update(repr(facts).encode())
            num_tensors += 1
            num_bytes += 0 if spec.alias_of is not None else spec.num_bytes
        return cls(digest=hasher.hexdigest(), num_tensors=num_tensors, num_bytes=num_bytes)


class Manifest(BaseModel):
    """What is needed besides the blocks to rebuild a state. `offsets[i]` is where the block of `tensors[i]` lies."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    skeleton: Any

    def to_json(self) -> bytes:
        """Return the manifest as ASCII JSON."""
        tensors = [spec.model_dump(mode="json") for spec in self.tensors]
        content = {"tensors": tensors, "offsets": self.offsets, "skeleton": self.skeleton}
        # Not pydantic's encoder: it refuses strings with lone surrogates, which file names may hold.
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Parse what `to_json` wrote; raises StateError for anything else."""
        try:
            return cls.model_validate(json.loads(data))
        except ValueError as error:
            raise StateError(f"a manifest cannot be read: {error}", path="") from None


@dataclass(frozen=True, slots=True)
class FlatState:
    """A flattened state: `tensors[i]` is the live tensor that `specs[i]` describes."""

    skeleton: Any
    specs: tuple[TensorSpec, ...]
    tensors: tuple[torch.Tensor, ...]
    overlaps: tuple[tuple[str, str], ...] = ()

    @property
    def layout(self) -> Layout:
        """Layout of the table of tensors."""
        return Layout.of(self.specs)

    def manifest(self, offsets: tuple[int, ...]) -> Manifest:
        """The part that is kept besides the blocks, which lie at `offsets`."""
        return Manifest(tensors=self.specs, offsets=offsets, skeleton=self.skeleton)


@lru_cache(maxsize=1 << 17)
def _spec(
    path: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    num_bytes: int,
    alias_of: int | None,
) -> TensorSpec:
    return TensorSpec(
        path=path,
        dtype=str(dtype).removeprefix("torch."),
        shape=shape,
        strides=strides,
        num_bytes=num_bytes,
        alias_of=alias_of,
    )


@dataclass(slots=True)
class _Table:
    allow_meta: bool
    specs: list[TensorSpec] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    _blocks: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def add(self, path: _skeleton.Path, tensor: torch.Tensor) -> int:
        name = _skeleton.join(path)
        refuse_unsupported(tensor, name, allow_meta=self.allow_meta)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        tensor = tensor.detach()
        layout = block_layout(tensor)
        index = len(self.specs)
        alias_of = None
        if layout.num_bytes and not tensor.is_meta:
            start = tensor.storage_offset() * tensor.element_size()
            gaps = None if layout.dense else (tensor.dtype, tensor.shape, tensor.stride())
            key = (tensor.device, tensor.untyped_storage().data_ptr(), start, layout.num_bytes, gaps)
            first = self._blocks.setdefault(key, index)
            alias_of = None if first == index else first
        self.specs.append(_spec(name, tensor.dtype, tuple(tensor.shape), layout.strides, layout.num_bytes, alias_of))
        self.tensors.append(tensor)
        return index

    def find_overlaps(self) -> tuple[tuple[str, str], ...]:
        found: list[tuple[str, str]] = []
        end, owner, last = 0, 0, None
        blocks = sorted(self._blocks.items(), key=lambda item: (str(item[0][0]), *item[0][1:4]))
        for (*storage, start, num_bytes, gaps), index in blocks:
            if gaps is not None:
                num_bytes = span_bytes(self.tensors[index])
            if storage == last and start < end:
                found.append((self.specs[owner].path, self.specs[index].path))
            if storage != last or start + num_bytes > end:
                end, owner, last = start + num_bytes, index, storage
        return tuple(found)


def flatten(state: Mapping[str, Any], *, allow_meta: bool = False) -> FlatState:
    """Return `state` as skeleton and table. Nothing is copied, except small numpy arrays and conjugate views.

    Raises:
        StateError: something in `state` cannot be kept; the sentence names its path.
    """
    table = _Table(allow_meta)
    skeleton = _skeleton.encode(dict(state), (), table.add)
    return FlatState(skeleton, tuple(table.specs), tuple(table.tensors), table.find_overlaps())


def check_match(saved: Manifest, live: FlatState) -> None:
    """Compare the tensors of a manifest with those of the live state, both ways.

    Raises:
        StateError: a tensor is missing or unexpected, or two share memory now that did not when they were kept.
    """
    ours = {spec.path: i for i, spec in enumerate(live.specs)}
    theirs = {spec.path: i for i, spec in enumerate(saved.tensors)}
    # What exists only from the first step on may be missing: some parameters never get a gradient.
    missing = [path for path, i in ours.items() if path not in theirs and not live.tensors[i].is_meta]
    unexpected = [path for path in theirs if path not in ours]
    if missing or unexpected:
        raise StateError(
            "the kept state does not match the script's state: "
            + "; ".join(
                f"{what} {', '.join(paths[:8])}{' ...' if len(paths) > 8 else ''}"
                for what, paths in (("missing in the kept state:", missing), ("unknown to the script:", unexpected))
                if paths
            )
            + "; restore with the code that made the checkpoint, or start a new job",
            path=(missing + unexpected)[0],
        )
    for path, index in ours.items():
        now = live.specs[index].alias_of
        if now is None:
            continue
        roots = {_root(saved.tensors, theirs[path]), _root(saved.tensors, theirs[live.specs[now].path])}
        if len(roots) > 1:
            raise StateError(
                f"tensors {path} and {live.specs[now].path} share memory now, but did not when they were kept",
                path=path,
            )


def unflatten(saved: Manifest, fill: FillBlock, live: FlatState | None = None) -> dict[str, Any]:
    """Rebuild a state. Blocks go straight into live tensors of the same path, dtype and shape, else into new ones.

    `fill(i, block)` must write the block of `saved.tensors[i]` into the uint8 tensor `block`, which may be live memory.
    New tensors are on the CPU. Call `check_match` first: nothing is compared here.
    """
    loader = _Loader(saved.tensors, fill, live)
    with torch.no_grad():
        tensors = [loader.load(index) for index in range(len(saved.tensors))]
        state = _skeleton.decode(saved.skeleton, tensors.__getitem__)
    if not isinstance(state, dict):
        raise StateError("the manifest does not hold a state of named parts", path="")
    return state


class _Loader:
    def __init__(self, specs: tuple[TensorSpec, ...], fill: FillBlock, live: FlatState | None) -> None:
        self._specs = specs
        self._fill = fill
        self._live = dict(zip((spec.path for spec in live.specs), live.tensors, strict=True)) if live else {}
        self._blocks: dict[int, torch.Tensor] = {}
        self._new: dict[tuple[Any, ...], torch.Tensor] = {}

    def load(self, index: int) -> torch.Tensor:
        spec, root = self._specs[index], _root(self._specs, index)
        dtype = _dtype(spec)
        target = self._live.get(spec.path)
        if target is not None and not target.is_meta and (target.dtype, tuple(target.shape)) == (dtype, spec.shape):
            layout = block_layout(target)
            if layout.dense and layout.strides == spec.strides:
                self._fill_once(root, raw_bytes(target, spec.num_bytes))
                return target
            source = view_as(self._block(root), dtype, spec.shape, spec.strides)
            if copy_values(target, source):
                return target
        key = (root, dtype, spec.shape, spec.strides)
        if key not in self._new:
            self._new[key] = view_as(self._block(root), dtype, spec.shape, spec.strides)
        return self._new[key]

    def _block(self, root: int) -> torch.Tensor:
        if root not in self._blocks:
            self._fill_once(root, torch.empty(self._specs[root].num_bytes, dtype=torch.uint8))
        return self._blocks[root]

    def _fill_once(self, root: int, block: torch.Tensor) -> None:
        first = self._blocks.setdefault(root, block)
        if first is block:
            self._fill(root, block)
        elif first.data_ptr() != block.data_ptr():
            block.copy_(first)


def _root(specs: tuple[TensorSpec, ...], index: int) -> int:
    alias_of = specs[index].alias_of
    if alias_of is None:
        return index
    if not 0 <= alias_of < index or specs[alias_of].alias_of is not None:
        raise StateError(f"the manifest gives tensor {specs[index].path} a wrong alias", path=specs[index].path)
    return alias_of


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"tensor {spec.path} has the unknown dtype {spec.dtype!r}", path=spec.path)
    return dtype

"""Every tensor and value that a training script may have comes back bit for bit."""

from __future__ import annotations

import math
import random
import struct
import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_ft.contracts.errors import StateError
from gemini_ft.worker._blocks import block_layout, dense_block, raw_bytes
from gemini_ft.worker.rng import RngState
from gemini_ft.worker.state_codec import FlatState, Manifest, check_match, flatten, unflatten

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - _QUANTIZED, key=str)


def _blocks(flat: FlatState) -> dict[int, bytes]:
    return {
        i: dense_block(t).numpy().tobytes()
        for i, (t, spec) in enumerate(zip(flat.tensors, flat.specs, strict=True))
        if spec.alias_of is None
    }


def _manifest(flat: FlatState) -> Manifest:
    return flat.manifest((0,) * len(flat.specs))


def _load(flat: FlatState, live: FlatState | None = None, blocks: dict[int, bytes] | None = None) -> dict[str, Any]:
    kept = _blocks(flat) if blocks is None else blocks

    def fill(index: int, block: torch.Tensor) -> None:
        block.numpy()[:] = np.frombuffer(kept[index], dtype=np.uint8)

    return unflatten(Manifest.from_json(_manifest(flat).to_json()), fill, live)


def _round_trip(value: Any) -> Any:
    return _load(flatten({"x": value}))["x"]


def _bits(tensor: torch.Tensor) -> bytes:
    """The elements in logical order, as bytes."""
    if tensor.numel() == 0:
        return b""
    size = tensor.element_size()
    memory = raw_bytes(tensor.as_strided((), (), 0), tensor.untyped_storage().nbytes()).numpy().tobytes()
    index = np.zeros(tuple(tensor.shape), dtype=np.int64) + tensor.storage_offset()
    for axis, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        index += (np.arange(n) * stride).reshape([-1 if a == axis else 1 for a in range(tensor.dim())])
    return b"".join(memory[i * size : (i + 1) * size] for i in index.reshape(-1).tolist())


def _random(dtype: torch.dtype, num_elements: int, seed: int) -> torch.Tensor:
    data = random.Random(seed).randbytes(num_elements * dtype.itemsize)
    if dtype is torch.bool:
        data = bytes(b & 1 for b in data)
    raw = torch.empty(len(data), dtype=torch.uint8)
    raw.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
    return raw.view(dtype)


LAYOUTS = {
    "contiguous": lambda t: t.as_strided((4, 3, 2), (6, 2, 1)),
    "transposed": lambda t: t.as_strided((2, 3, 4), (1, 2, 6)),
    "offset": lambda t: t.as_strided((5,), (1,), 7),
    "gaps": lambda t: t.as_strided((4, 3), (6, 2), 1),
    "expanded": lambda t: t.as_strided((3, 4, 2), (0, 2, 1), 3),
    "expanded_gaps": lambda t: t.as_strided((2, 3, 2), (5, 0, 3), 1),
    "overlapping": lambda t: t.as_strided((3, 3), (1, 1), 2),
    "scalar": lambda t: t.as_strided((), (), 9),
    "empty": lambda t: t.as_strided((0, 3), (3, 1)),
    "one": lambda t: t.as_strided((1, 4, 1), (99, 1, 7), 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_comes_back(dtype: torch.dtype, layout: str) -> None:
    tensor = LAYOUTS[layout](_random(dtype, 24, seed=1))
    flat = flatten({"x": tensor})
    assert len(_blocks(flat)[0]) == block_layout(tensor).num_bytes <= tensor.numel() * dtype.itemsize
    back = _load(flat)["x"]
    assert (back.dtype, back.shape, _bits(back)) == (dtype, tensor.shape, _bits(tensor))
    if block_layout(tensor).dense:
        assert back.stride() == tensor.stride()

    other = LAYOUTS[layout](_random(dtype, 24, seed=2))
    result = _load(flat, live=flatten({"x": other}))["x"]
    assert _bits(result) == _bits(tensor)
    assert (result.data_ptr() == other.data_ptr()) == (layout != "overlapping" or tensor.numel() == 0)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_strided_views_with_aliases_come_back(data: st.DataObject) -> None:
    """Property: dtype x layout x size x aliasing, into new tensors and into live ones."""
    dtype = data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.integers(1, 64))
    storage, live_storage = _random(dtype, size, 1), _random(dtype, size, 2)
    state, live = {}, {}
    for name in data.draw(st.lists(st.sampled_from("abcd"), unique=True)):
        shape, strides, reach = [], [], 0
        for _ in range(data.draw(st.integers(0, 3))):
            stride = data.draw(st.sampled_from([0, reach + 1, reach + 2, 2 * reach + 1]))
            n = data.draw(st.integers(0, 4))
            shape.append(n)
            strides.append(stride)
            reach += max(n - 1, 0) * stride
        offset = data.draw(st.integers(0, 3))
        if reach + offset >= size:
            continue
        order = data.draw(st.permutations(range(len(shape))))
        where = [shape[i] for i in order], [strides[i] for i in order], offset
        state[name], live[name] = storage.as_strided(*where), live_storage.as_strided(*where)
    flat = flatten(state)
    for target in (None, flatten(live)):
        back = _load(flat, live=target)
        assert list(back) == list(state)
        for name, tensor in state.items():
            assert back[name].shape == tensor.shape
            assert _bits(back[name]) == _bits(tensor)


def test_a_small_view_costs_what_it_shows() -> None:
    flat = flatten({"x": torch.zeros(1 << 20)[5:9], "y": torch.zeros(1).expand(1 << 20)})
    assert [spec.num_bytes for spec in flat.specs] == [16, 4]
    assert flat.layout.num_bytes == 20


def test_tied_tensors_stay_tied() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    flat = flatten({"a": weight, "b": weight, "c": weight.detach().view(12)})
    assert [spec.alias_of for spec in flat.specs] == [None, 0, 0]
    back = _load(flat)
    assert back["a"] is back["b"]
    assert back["c"].data_ptr() == back["a"].data_ptr()
    assert torch.equal(back["c"], weight.detach().view(12))


def test_tied_tensors_load_into_live_ones_that_are_tied_or_not() -> None:
    weight = torch.randn(5)
    flat = flatten({"a": weight, "b": weight})
    apart = {"a": torch.zeros(5), "b": torch.zeros(5)}
    _load(flat, live=flatten(apart))
    assert torch.equal(apart["a"], weight)
    assert torch.equal(apart["b"], weight)
    tied = torch.zeros(5)
    _load(flat, live=flatten({"a": tied, "b": tied}))
    assert torch.equal(tied, weight)


def test_tensors_tied_only_now_are_refused() -> None:
    saved = flatten({"a": torch.zeros(2), "b": torch.ones(2)})
    tied = torch.zeros(2)
    with pytest.raises(StateError, match="b and a share memory now"):
        check_match(_manifest(saved), flatten({"a": tied, "b": tied}))


def test_partial_overlap_is_kept_twice_and_said() -> None:
    storage = torch.arange(10.0)
    flat = flatten({"a": storage[:6], "b": storage[4:], "c": torch.zeros(2)})
    assert flat.overlaps == (("a", "b"),)
    back = _load(flat)
    assert torch.equal(back["a"], storage[:6])
    assert torch.equal(back["b"], storage[4:])


def test_conjugate_and_negative_bits_are_resolved() -> None:
    value = torch.tensor([1 + 2j, -0.0 - 3j])
    assert torch.equal(_round_trip(value.conj()), value.conj())
    assert torch.equal(_round_trip(value.conj().imag), value.conj().imag)


def test_live_parameters_keep_their_identity_and_module_load_copies_nothing() -> None:
    source, target = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    target.weight.requires_grad_(False)
    flat, live = flatten({"model": source.state_dict()}), flatten({"model": target.state_dict()})
    check_match(_manifest(flat), live)
    before = target.weight.data_ptr()
    state = _load(flat, live=live)
    assert state["model"]["weight"].data_ptr() == before
    target.load_state_dict(state["model"])
    assert torch.equal(target.weight, source.weight)
    assert not target.weight.requires_grad
    assert target.bias.requires_grad


def test_both_key_sets_are_compared() -> None:
    saved = flatten({"m": {"a": torch.zeros(1), "b": torch.zeros(1)}})
    live = flatten({"m": {"b": torch.zeros(1), "c": torch.zeros(1)}})
    with pytest.raises(StateError, match="missing in the kept state: m/c; unknown to the script: m/a"):
        check_match(_manifest(saved), live)


def test_layout_depends_on_names_shapes_and_dtypes_only() -> None:
    def digest(**state: torch.Tensor) -> str:
        return flatten(state).layout.digest

    base = digest(a=torch.zeros(2))
    assert base == digest(a=torch.ones(2))
    assert len({base, digest(b=torch.zeros(2)), digest(a=torch.zeros(3)), digest(a=torch.zeros(2).half())}) == 4


VALUES = [
    None,
    True,
    0,
    -(1 << 63),
    1 << 200,
    -0.0,
    1e-323,
    "text \ud800 \N{SNOWMAN}",
    b"\x00\xff",
    bytearray(b"ab"),
    1 - 2j,
    [],
    (),
    (1, [2, (3,)]),
    {},
    {"$": 1, "a": 2},
    {1: "int", "1": "str"},
    torch.Size([2, 3]),
    torch.bfloat16,
    torch.device("cuda:1"),
    OrderedDict(b=1, a=2),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    back = _round_trip(value)
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF0000000000000, 0x7FF0000000000000])
def test_floats_that_are_not_finite_keep_their_bits(bits: int) -> None:
    (value,) = struct.unpack(">d", struct.pack(">Q", bits))
    assert struct.pack(">d", _round_trip(value)) == struct.pack(">Q", bits)
    back = _round_trip(complex(value, -0.0))
    assert math.copysign(1, back.imag) == -1


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.asfortranarray(np.arange(2000.0).reshape(40, 50)),
        np.zeros((0, 3), dtype=np.float16),
        np.array(["ab", "c"]),
        np.array(5),
        np.array(["2026-01-02"], dtype="datetime64[D]"),
    ],
    ids=lambda a: str(a.dtype),
)
def test_numpy_arrays_come_back(array: Any) -> None:
    back = _round_trip(array)
    assert (back.dtype.str, back.shape, back.flags.f_contiguous) == (
        array.dtype.str,
        array.shape,
        array.flags.f_contiguous,
    )
    assert back.tobytes("A") == array.tobytes("A")
    back[...] = array  # it may be written to


@pytest.mark.parametrize("value", [np.float32(0.1), np.int64(-3), np.bool_(True), np.float64(2.5)], ids=repr)
def test_numpy_scalars_keep_their_type(value: Any) -> None:
    back = _round_trip(value)
    assert type(back) is type(value)
    assert back == value


def test_module_metadata_survives() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    assert _round_trip(state)._metadata == state._metadata


class _Thing:
    pass


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"a": [_Thing()]}, r"state x/a/0 is a .*_Thing, which Gemini-FT does not keep"),
        ({"a": {1.5: 0}}, r"state x/a has the key 1\.5 of type float"),
        ({"s": {1, 2}}, r"state x/s is a builtins\.set"),
        (np.array([_Thing()]), "numpy array of dtype object"),
        (torch.zeros(2, device="meta"), "tensor x is on the meta device"),
        (torch.eye(2).to_sparse(), "tensor x has layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(value: Any, sentence: str) -> None:
    with pytest.raises(StateError, match=sentence):
        flatten({"x": value})


def test_quantized_and_fake_tensors_and_freed_storages_are_refused_by_name() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with pytest.raises(StateError, match="tensor q has the quantized dtype"):
        flatten({"q": quantized})
    with FakeTensorMode():
        fake = torch.zeros(2)
    with pytest.raises(StateError, match=r"tensor f is a .*FakeTensor"):
        flatten({"f": fake})
    freed = torch.zeros(2)
    freed.untyped_storage().resize_(0)
    with pytest.raises(StateError, match="tensor g has no memory now"):
        flatten({"g": freed})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    with pytest.raises(StateError, match="nested deeper"):
        flatten(state)


def test_a_manifest_that_we_did_not_write_is_refused() -> None:
    with pytest.raises(StateError, match="cannot be read"):
        Manifest.from_json(b'{"tensors": 3}')
    with pytest.raises(StateError, match="unknown kind"):
        unflatten(Manifest(tensors=(), offsets=(), skeleton={"a": {"$": "pickle", "v": ""}}), lambda i, b: None)


def test_random_generators_continue_where_they_were() -> None:
    rng = RngState()

    def draw() -> tuple[Any, ...]:
        return (
            random.random(),
            random.gauss(0, 1),
            np.random.standard_normal(3).tobytes(),
            torch.rand(4).numpy().tobytes(),
        )

    np.random.standard_normal(1)
    random.gauss(0, 1)
    flat = flatten({"rng": rng.state_dict()})
    blocks = _blocks(flat)
    expected = draw()
    draw()
    rng.load_state_dict(_load(flat, blocks=blocks)["rng"])
    assert draw() == expected

"""Staging takes the state as it is at the call, whatever the training thread does next."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_ft.contracts.buffer_format import BufferGeometry, BufferState, ShardBuffer
from gemini_ft.contracts.errors import CapacityError, StateError
from gemini_ft.contracts.local_protocol import FillBegun, Sealed, Staged
from gemini_ft.worker import staging
from gemini_ft.worker._blocks import dense_block
from gemini_ft.worker._mapping import SharedMapping
from gemini_ft.worker.agent_client import AgentClient
from gemini_ft.worker.identity import RankIdentity
from gemini_ft.worker.staging import Stager, storages_of
from gemini_ft.worker.state_codec import Manifest, flatten, unflatten
from gemini_ft.worker.testing import SoloAgent

BOUND = timedelta(seconds=20)


@pytest.fixture
def client() -> Iterator[AgentClient]:
    with tempfile.TemporaryDirectory(prefix="gft") as folder, SoloAgent(Path(folder)) as agent:
        client = AgentClient(RankIdentity.from_environment(agent.environment()))
        client.start(BOUND)
        client.agent = agent  # type: ignore[attr-defined]
        yield client
        client.close()


def _buffer(num_bytes: int, chunk_bytes: int = 4096) -> ShardBuffer:
    geometry = BufferGeometry.for_shard(num_bytes, 1 << 16, chunk_bytes)
    buffer = ShardBuffer(memoryview(bytearray(geometry.file_bytes)), geometry)
    buffer.format("job-solo", 0, 1)
    return buffer


def _read(buffer: ShardBuffer) -> dict[str, object]:
    header = buffer.verify()
    manifest = Manifest.from_json(buffer.manifest())
    data = np.frombuffer(buffer.data(header.data_bytes), dtype=np.uint8)

    def fill(index: int, block: torch.Tensor) -> None:
        start = manifest.offsets[index]
        np.copyto(block.numpy(), data[start : start + block.numel()])

    return unflatten(manifest, fill)


@contextmanager
def _stager(client: AgentClient) -> Iterator[Stager]:
    stager = Stager(client, BOUND)
    yield stager
    stager.close()


def test_what_no_optimizer_owns_may_change_right_after_the_call(client: AgentClient) -> None:
    state = {
        "buffer": torch.arange(50_000.0),
        "view": torch.arange(40_000, dtype=torch.int16).view(200, 200)[:, ::2],
        "plain": {"epoch": 3, "seen": [1, 2]},
        "array": np.arange(5000),
    }
    expected = {"buffer": state["buffer"].clone(), "view": state["view"].clone(), "array": state["array"].copy()}  # type: ignore[attr-defined]
    flat = flatten(state)
    buffer = _buffer(flat.layout.num_bytes)
    with _stager(client) as stager:
        stager.begin(7, flat, set(), buffer, 0, None)
        state["buffer"].zero_()  # type: ignore[attr-defined]
        state["view"].zero_()  # type: ignore[attr-defined]
        state["array"][:] = 0  # type: ignore[index]
        state["plain"]["seen"].append(3)  # type: ignore[index]
        stager.wait()
        assert stager.error is None
    back = _read(buffer)
    assert torch.equal(back["buffer"], expected["buffer"])  # type: ignore[arg-type]
    assert torch.equal(back["view"], expected["view"])  # type: ignore[arg-type]
    assert np.array_equal(back["array"], expected["array"])  # type: ignore[arg-type]
    assert back["plain"] == {"epoch": 3, "seen": [1, 2]}
    assert buffer.header().step == 7


def test_a_training_thread_that_steps_after_the_wait_never_tears_a_version(client: AgentClient) -> None:
    """Property, over a real loop: each sealed version equals the parameters and moments at its call."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()

    step()
    buffers = [_buffer(1 << 22) for _ in range(2)]
    with _stager(client) as stager:
        for number in range(6):
            flat = flatten({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            expected = [dense_block(tensor).clone() for tensor in flat.tensors]
            buffer = buffers[number % 2]
            stager.begin(number, flat, storages_of([optimizer]), buffer, number % 2, None)
            model(torch.randn(8, 300)).square().mean().backward()
            stager.wait()
            step()
            assert stager.error is None
            found = flatten(_read(buffer))
            assert [spec.path for spec in found.specs] == [spec.path for spec in flat.specs]
            assert all(torch.equal(dense_block(a), b) for a, b in zip(found.tensors, expected, strict=True))
            assert buffer.header().step == number


def test_a_parameter_changed_behind_the_optimizers_back_is_never_sealed(
    client: AgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = threading.Event()

    def hold_staging_thread(name: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert changed.wait(30), f"waited in vain at {name} for the parameter to be changed"

    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    buffer = _buffer(1 << 20)
    flat = flatten({"model": model.state_dict()})
    with _stager(client) as stager:
        monkeypatch.setattr(staging, "fault_point", hold_staging_thread)
        stager.begin(1, flat, storages_of([optimizer]), buffer, 0, None)
        with torch.no_grad():
            model.weight.mul_(2)
        changed.set()
        stager.wait()
        assert isinstance(stager.error, StateError)
        assert "tensor model/weight was changed outside optimizer.step()" in str(stager.error)
    assert buffer.header().state is BufferState.FILLING


def test_the_agent_hears_begun_staged_sealed_in_order(client: AgentClient) -> None:
    agent: SoloAgent = client.agent  # type: ignore[attr-defined]
    weight = torch.nn.Parameter(torch.randn(1 << 16))
    flat = flatten({"w": weight})
    path = agent.buffer_path(0, 0)
    path.write_bytes(bytes(BufferGeometry.for_shard(1 << 18, 1 << 16).file_bytes))
    mapping = SharedMapping(path)
    buffer = ShardBuffer(mapping.view, BufferGeometry.for_shard(1 << 18, 1 << 16))
    buffer.format(agent.job_id, 0, 1)
    with _stager(client) as stager:
        stager.begin(4, flat, {weight.untyped_storage().data_ptr()}, buffer, 0, 2)
        stager.wait()
    agent.wait_for(Sealed, step=4)
    kinds = [type(m) for m in agent.received if isinstance(m, FillBegun | Staged | Sealed)]
    assert kinds[0] is FillBegun
    assert kinds[-1] is Sealed
    staged = [m.num_chunks for m in agent.received if isinstance(m, Staged)]
    assert staged == sorted(staged)
    assert staged[-1] == buffer.header().num_chunks
    assert client.rank_page.sealed_everywhere_step == 4
    mapping.close()


def test_a_state_that_outgrew_its_buffer_is_refused_at_the_call(client: AgentClient) -> None:
    flat = flatten({"x": torch.zeros(1 << 20)})
    with _stager(client) as stager, pytest.raises(CapacityError, match="staged 4194304 bytes at step 1, but"):
        stager.begin(1, flat, set(), _buffer(1 << 12), 0, None)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30_000), max_size=6),
    late=st.lists(st.booleans(), min_size=6, max_size=6),
    chunk_bytes=st.sampled_from([4096, 8192, 65536]),
)
def test_any_cut_into_chunks_gives_the_bytes_and_digests(sizes: list[int], late: list[bool], chunk_bytes: int) -> None:
    tensors = {f"t{i}": torch.randint(0, 256, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    flat = flatten(tensors)
    storages = {
        t.untyped_storage().data_ptr() for t, is_late in zip(flat.tensors, late, strict=False) if is_late and t.numel()
    }
    buffer = _buffer(flat.layout.num_bytes, chunk_bytes)
    client = AgentClient(RankIdentity("job-solo", 1, 0, 1, Path("/nowhere")))
    with _stager(client) as stager:
        stager.begin(3, flat, storages, buffer, 0, None)
        stager.wait()
        assert stager.error is None
    back = _read(buffer)
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())  # type: ignore[arg-type]

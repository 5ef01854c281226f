"""Two buffers a shard: whatever happens, a version that may be needed is somewhere.

The state machine drives the real choice of buffers and the real buffer format through steps, crashes and
recoveries of one shard on an owner and a holder.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gemini_ft.agent.replicas.store import buffer_to_fill
from gemini_ft.contracts.buffer_format import BufferGeometry, BufferHeader, BufferState, ShardBuffer, digest

GEOMETRY = BufferGeometry.for_shard(100, 10)


def header(step: int, generation: int = 1) -> BufferHeader:
    return BufferHeader(BufferState.SEALED, "job", generation, 0, 1, step, 100, GEOMETRY, 0, bytes(16))


def test_the_base_is_kept_even_if_it_is_the_older_one() -> None:
    assert buffer_to_fill([header(4), header(5)], base_step=4) == 1
    assert buffer_to_fill([header(5), header(4)], base_step=4) == 0


def test_without_a_base_the_newest_is_kept() -> None:
    assert buffer_to_fill([header(4), header(5)], None) == 0
    assert buffer_to_fill([header(5), header(4)], None) == 1
    assert buffer_to_fill([header(5, 2), header(5, 1)], None) == 1


def test_what_holds_no_copy_is_filled_first() -> None:
    assert buffer_to_fill([header(5), None], None) == 1
    assert buffer_to_fill([None, header(5)], 5) == 0
    assert buffer_to_fill([header(4), header(5)], base_step=9) == 0


class Side:
    """Two buffers of one shard in one place."""

    def __init__(self) -> None:
        self.buffers = [ShardBuffer(memoryview(bytearray(GEOMETRY.file_bytes)), GEOMETRY) for _ in range(2)]
        for buffer in self.buffers:
            buffer.format("job", 0, 1)

    def copies(self) -> list[BufferHeader | None]:
        headers = [buffer.header() for buffer in self.buffers]
        return [found if found.state is BufferState.SEALED else None for found in headers]

    def steps(self) -> set[int]:
        return {buffer.verify().step for buffer, copy in zip(self.buffers, self.copies(), strict=True) if copy}

    def begin(self, step: int, base_step: int | None, generation: int) -> ShardBuffer:
        buffer = self.buffers[buffer_to_fill(self.copies(), base_step)]
        buffer.begin("job", generation, 0, 1, step, 100)
        buffer.chunk(0, 100)[:] = bytes([step % 256]) * 100
        buffer.set_chunk_digest(0, digest(buffer.chunk(0, 100)))
        return buffer

    def discard_newer(self, step: int | None) -> None:
        for buffer, copy in zip(self.buffers, self.copies(), strict=True):
            if copy is not None and (step is None or copy.step > step):
                buffer.discard()


class TwoBuffers(RuleBasedStateMachine):
    """Owner and holder of one shard; the model knows which version is committed."""

    @initialize()
    def start(self) -> None:
        self.owner, self.holder = Side(), Side()
        self.generation = 1
        self.committed: int | None = None
        self.last_begun: int | None = None
        self.filling_here: ShardBuffer | None = None
        self.filling_there: ShardBuffer | None = None

    @precondition(lambda self: self.filling_here is None and self.committed == self.last_begun)
    @rule()
    def stage(self) -> None:
        self.last_begun = 0 if self.last_begun is None else self.last_begun + 1
        self.filling_here = self.owner.begin(self.last_begun, self.committed, self.generation)

    @precondition(lambda self: self.filling_here is not None)
    @rule()
    def seal(self) -> None:
        assert self.filling_here is not None
        self.filling_here.seal(b"")
        self.filling_here = None

    @precondition(lambda self: self.last_begun is not None and self.last_begun not in self.holder.steps())
    @rule()
    def replicate_begin(self) -> None:
        assert self.last_begun is not None
        self.filling_there = self.holder.begin(self.last_begun, self.committed, self.generation)

    @precondition(lambda self: self.filling_there is not None and self.last_begun in self.owner.steps())
    @rule()
    def replicate_seal(self) -> None:
        assert self.filling_there is not None
        self.filling_there.seal(b"")
        self.filling_there = None

    @precondition(lambda self: self.last_begun in self.owner.steps() & self.holder.steps())
    @rule()
    def commit(self) -> None:
        self.committed = self.last_begun

    @rule(lost=st.sampled_from(["rank", "owner", "holder"]))
    def fail_and_recover(self, lost: str) -> None:
        """One party is lost; the newest version that is left is restored and replicated again."""
        self.generation += 1
        self.filling_here = self.filling_there = None
        if lost == "owner":
            self.owner = Side()
        elif lost == "holder":
            self.holder = Side()
        restored = max(self.owner.steps() | self.holder.steps(), default=None)
        assert self.committed is None or (restored is not None and restored >= self.committed)
        for side in (self.owner, self.holder):
            side.discard_newer(restored)
            if restored is not None and restored not in side.steps():
                side.begin(restored, None, self.generation).seal(b"")
        self.committed = self.last_begun = restored

    @invariant()
    def the_committed_version_is_on_both_sides(self) -> None:
        if self.committed is not None:
            assert self.committed in self.owner.steps()
            assert self.committed in self.holder.steps()


TestTwoBuffers = TwoBuffers.TestCase
TestTwoBuffers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

"""The replica store: two buffers for each shard that this node holds, in one folder a job on tmpfs.

Invariant: a buffer that holds the version which somebody may still need is never given up. `buffer_to_fill`
is the one place that decides which of the two that is.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from gemini_ft.agent.capacity import check_capacity, read_capacity_facts
from gemini_ft.agent.replicas.buffer_file import (
    NEW_SUFFIX,
    BufferFile,
    allocated_bytes,
    create_buffer_file,
    is_locked,
    open_buffer_file,
)
from gemini_ft.agent.replicas.interface import VerifiedCopies
from gemini_ft.contracts.buffer_format import BufferGeometry, BufferHeader, BufferState
from gemini_ft.contracts.errors import CapacityError, ConfigurationError, ConflictError, IntegrityError, ProtocolError
from gemini_ft.contracts.messages import HeldVersion
from gemini_ft.faults import fault_point

__all__ = ["PAGE_PREFIX", "ReplicaStore", "buffer_to_fill"]

PAGE_PREFIX: Final = "page.rank"
NUM_BUFFERS: Final = 2

_log = logging.getLogger(__name__)
_GONE_SUFFIX = ".gone"
_NUM_ADOPTION_ATTEMPTS = 20
_ADOPTION_PAUSE_S = 0.005
_BUFFER_NAME = re.compile(r"rank(?P<rank>\d{1,9})\.(?P<index>[01])")

Pair = tuple[BufferFile, BufferFile]
T = TypeVar("T")


def buffer_to_fill(copies: Sequence[BufferHeader | None], base_step: int | None) -> int:
    """Return the index of the buffer that may be given up.

    Args:
        copies: header of the verified sealed copy in each buffer, None where there is none.
        base_step: version that is committed and must be kept, if it is here.

    Without a base, or when both hold it, the newest copy is kept.
    """
    given_up = 0
    for index, copy in enumerate(copies):
        if _worth(copy, base_step) < _worth(copies[given_up], base_step):
            given_up = index
    return given_up


def _worth(copy: BufferHeader | None, base_step: int | None) -> tuple[bool, bool, int, int]:
    if copy is None:
        return (False, False, 0, 0)
    return (True, copy.step == base_step, copy.step, copy.generation)


class ReplicaStore:
    """Buffers of one job on one node. Use on the event loop; what blocks goes to threads."""

    def __init__(self, memory_dir: Path, job_id: str, limit_bytes: int | None) -> None:
        self._memory_dir = memory_dir
        self._limit_bytes = limit_bytes
        self._pairs: dict[int, Pair] = {}
        self._allocation = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._folder_lock: int | None = None
        self.job_id = job_id
        self.folder = memory_dir / job_id

    # ---- life

    async def open(self) -> VerifiedCopies:
        """Lock the folder, remove what was leaked, adopt what a former life left, and verify it.

        Sealed copies are trusted only after a full check; one that fails is discarded, unless a live rank may be
        writing there. FILLING buffers stay as they are.

        Raises:
            ConflictError: another agent uses this folder.
            ConfigurationError: it belongs to another user.
        """
        _make_private(self._memory_dir)
        self._sweep_other_jobs()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._folder_lock = _lock_folder(self.folder)
        found: dict[int, dict[int, BufferFile]] = {}
        for path in sorted(self.folder.iterdir()):
            match = _BUFFER_NAME.fullmatch(path.name)
            if match is not None:
                rank = int(match["rank"])
                buffer_file = await self._adopt(path, rank)
                if buffer_file is not None:
                    found.setdefault(rank, {})[int(match["index"])] = buffer_file
            elif _is_own(path):
                path.unlink(missing_ok=True)
        for rank, buffers in found.items():
            await self._complete(rank, buffers)
        return await self.verify()

    async def settle(self) -> None:
        """Wait until no file is being made any more."""
        await asyncio.gather(*self._changes, return_exceptions=True)

    def close(self) -> None:
        """Let go of folder and mappings; the files stay for the next life."""
        self._pairs.clear()
        if self._folder_lock is not None:
            os.close(self._folder_lock)
            self._folder_lock = None

    async def remove(self) -> None:
        """Free all memory of the job."""
        await self.drop(*self._pairs)
        await asyncio.to_thread(_remove_own, self.folder)
        self.close()

    # ---- buffers

    def pair(self, rank: int) -> Pair | None:
        """Return both buffers of a rank, None if nothing was reserved for it."""
        return self._pairs.get(rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose shards have memory here."""
        return tuple(self._pairs)

    def copies(self, rank: int) -> list[tuple[int, BufferFile, BufferHeader]]:
        """Return (buffer index, file, header) of the verified copies of a rank's shard, newest first."""
        found = [
            (index, buffer_file, copy)
            for index, buffer_file in enumerate(self._pairs.get(rank, ()))
            if (copy := buffer_file.copy) is not None
        ]
        return sorted(found, key=lambda entry: (entry[2].step, entry[2].generation), reverse=True)

    async def reserve(self, rank: int, world_size: int, geometry: BufferGeometry) -> Pair:
        """Set both buffers aside. Buffers that are large enough are kept with what they hold; others grow.

        Raises:
            CapacityError: too little memory; nothing was allocated.
        """
        return await self._to_the_end(self._reserve(rank, world_size, geometry))

    async def _reserve(self, rank: int, world_size: int, geometry: BufferGeometry) -> Pair:
        async with self._allocation:
            pair = self._pairs.get(rank)
            if pair is None:
                self._require(NUM_BUFFERS * geometry.file_bytes, f"both buffers of rank {rank}")
                first = await asyncio.to_thread(
                    create_buffer_file, self._path(rank, 0), geometry, self.job_id, rank, world_size
                )
                try:
                    second = await asyncio.to_thread(
                        create_buffer_file, self._path(rank, 1), geometry, self.job_id, rank, world_size
                    )
                except CapacityError:
                    first.path.unlink(missing_ok=True)
                    raise
                self._pairs[rank] = pair = (first, second)
                return pair
            for index in range(NUM_BUFFERS):
                if not _fits(self._pairs[rank][index].buffer.geometry, geometry):
                    await self._grow(rank, index, world_size, geometry)
            return self._pairs[rank]

    async def buffer_for(
        self, rank: int, world_size: int, geometry: BufferGeometry, base_step: int | None
    ) -> BufferFile:
        """Return the buffer that a version of this geometry may be received into; raises as `reserve`."""
        return await self._to_the_end(self._buffer_for(rank, world_size, geometry, base_step))

    async def _buffer_for(
        self, rank: int, world_size: int, geometry: BufferGeometry, base_step: int | None
    ) -> BufferFile:
        await self._reserve(rank, world_size, geometry)
        async with self._allocation:
            pair = self._pairs[rank]
            index = buffer_to_fill([buffer_file.copy for buffer_file in pair], base_step)
            if pair[index].buffer.geometry.chunk_bytes != geometry.chunk_bytes:
                pair[index].discard()
                await self._replace(rank, index, world_size, geometry, keep=False)
            return self._pairs[rank][index]

    async def replace_locked(self, rank: int) -> None:
        """Move each buffer of a rank that a process still locks into a new file, which that process does not know."""
        await self._to_the_end(self._replace_locked(rank))

    async def _replace_locked(self, rank: int) -> None:
        async with self._allocation:
            pair = self._pairs.get(rank, ())
            for index, buffer_file in enumerate(pair):
                if not is_locked(buffer_file.path):
                    continue
                header = buffer_file.header()
                world_size = header.world_size if header is not None else 0
                try:
                    await self._replace(rank, index, world_size, buffer_file.buffer.geometry, keep=True)
                except CapacityError as error:
                    _log.error("a process that could not be ended locks %s: %s", buffer_file.path, error)
                    await self.drop(rank)
                    return

    async def verify(self) -> VerifiedCopies:
        """Check every byte of every sealed copy in threads, trust the good ones and discard the bad ones."""
        files = [buffer_file for pair in self._pairs.values() for buffer_file in pair]
        results = await asyncio.gather(*(asyncio.to_thread(_verify, buffer_file) for buffer_file in files))
        held: list[HeldVersion] = []
        damaged: list[str] = []
        for buffer_file, result in zip(files, results, strict=True):
            if isinstance(result, BufferHeader):
                buffer_file.trust(result)
                held.append(
                    HeldVersion(
                        rank=result.rank,
                        step=result.step,
                        generation=result.generation,
                        shard_digest=result.shard_digest.hex(),
                    )
                )
            elif result is not None:
                _log.error("%s: %s", buffer_file.path, result)
                damaged.append(result)
                if not is_locked(buffer_file.path):
                    buffer_file.discard()
        return VerifiedCopies(tuple(sorted(held, key=lambda version: (version.rank, version.step))), tuple(damaged))

    def discard_rolled_back(self, restore_step: int | None, generation: int) -> None:
        """Discard copies newer than the restored step that generations before `generation` have staged."""
        for rank in self._pairs:
            for _, buffer_file, copy in self.copies(rank):
                if copy.generation < generation and (restore_step is None or copy.step > restore_step):
                    _log.info("discarding rank %d at step %d, which was rolled back", rank, copy.step)
                    buffer_file.discard()

    async def drop(self, *ranks: int) -> None:
        """Free both buffers of each rank."""
        gone: list[Path] = []
        for rank in ranks:
            for buffer_file in self._pairs.pop(rank, ()):
                buffer_file.take_for_writing()
                if buffer_file.path.exists():
                    gone.append(
                        buffer_file.path.rename(buffer_file.path.with_name(f"{buffer_file.path.name}{_GONE_SUFFIX}"))
                    )
        # Giving pages back takes 0.1 s and more a gigabyte.
        await self._to_the_end(asyncio.to_thread(_remove, *gone))

    # ---- figures

    @property
    def used_bytes(self) -> int:
        """Memory that all buffers take."""
        return sum(allocated_bytes(buffer_file.path) for pair in self._pairs.values() for buffer_file in pair)

    @property
    def capacity_bytes(self) -> int:
        """Memory that buffers take or could take."""
        facts = read_capacity_facts(self._memory_dir)
        limits = [facts.free_bytes, facts.cgroup_free_bytes, facts.available_bytes]
        possible = self.used_bytes + min(limit for limit in limits if limit is not None)
        return possible if self._limit_bytes is None else min(possible, self._limit_bytes)

    # ---- inside

    async def _adopt(self, path: Path, rank: int) -> BufferFile | None:
        for attempt in range(_NUM_ADOPTION_ATTEMPTS):
            try:
                return open_buffer_file(path, self.job_id, rank)
            except (ProtocolError, OSError) as error:
                # A live rank may be in the middle of writing its header, which takes it microseconds.
                if attempt < _NUM_ADOPTION_ATTEMPTS - 1 and is_locked(path):
                    await asyncio.sleep(_ADOPTION_PAUSE_S)
                    continue
                _log.warning("removing %s, which cannot be adopted: %s", path, error)
                _remove(path)
                break
        return None

    async def _complete(self, rank: int, buffers: dict[int, BufferFile]) -> None:
        """Make a pair of what was found: one is missing if the agent was killed between the two, or was damaged."""
        some = next(iter(buffers.values()))
        header = some.buffer.header()
        try:
            for index in set(range(NUM_BUFFERS)) - set(buffers):
                self._require(header.geometry.file_bytes, f"a buffer of rank {rank}")
                buffers[index] = await asyncio.to_thread(
                    create_buffer_file, self._path(rank, index), header.geometry, self.job_id, rank, header.world_size
                )
            self._pairs[rank] = (buffers[0], buffers[1])
        except CapacityError as error:
            _log.error("giving up the only buffer of rank %d: %s", rank, error)
            some.path.unlink(missing_ok=True)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Let a change of files end, and its thread with it, even if who asked for it is cancelled."""
        task = asyncio.create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    def _path(self, rank: int, index: int) -> Path:
        return self.folder / f"rank{rank}.{index}"

    def _require(self, need_bytes: int, what: str, replaced_bytes: int = 0) -> None:
        left_bytes = None if self._limit_bytes is None else self._limit_bytes - self.used_bytes + replaced_bytes
        if left_bytes is not None and need_bytes > left_bytes:
            have_bytes = max(0, left_bytes)
            raise CapacityError(
                f"{what} need {need_bytes} bytes, but {have_bytes} bytes of memory_limit_bytes "
                f"({self._limit_bytes}) are left; raise that limit, run fewer ranks on a node or keep fewer replicas",
                need_bytes=need_bytes,
                have_bytes=have_bytes,
                knob="memory_limit_bytes",
            )
        report = check_capacity(need_bytes, read_capacity_facts(self._memory_dir))
        if not report.fits:
            raise CapacityError(
                f"{what}: {report.message}", need_bytes=need_bytes, have_bytes=report.have_bytes, knob=report.knob
            )

    async def _grow(self, rank: int, index: int, world_size: int, geometry: BufferGeometry) -> None:
        """Make one buffer large enough; a copy in it keeps the size of its chunks, and so its digests."""
        buffer_file = self._pairs[rank][index]
        if buffer_file.copy is not None:
            have = buffer_file.buffer.geometry
            num_chunks = -(-max(geometry.capacity_bytes, have.capacity_bytes) // have.chunk_bytes)
            geometry = BufferGeometry(
                num_chunks * have.chunk_bytes,
                have.chunk_bytes,
                max(geometry.manifest_capacity_bytes, have.manifest_capacity_bytes),
            )
        await self._replace(rank, index, world_size, geometry, keep=True)

    async def _replace(self, rank: int, index: int, world_size: int, geometry: BufferGeometry, *, keep: bool) -> None:
        old = self._pairs[rank][index]
        old.take_for_writing()
        self._require(geometry.file_bytes, f"a new buffer of rank {rank}", allocated_bytes(old.path))
        source = old.buffer if keep and old.header() is not None else None
        new = await asyncio.to_thread(
            create_buffer_file, self._path(rank, index), geometry, self.job_id, rank, world_size, source
        )
        if old.copy is not None and keep:
            result = await asyncio.to_thread(_verify, new)
            if isinstance(result, BufferHeader):
                new.trust(result)
        pair = list(self._pairs[rank])
        pair[index] = new
        self._pairs[rank] = (pair[0], pair[1])

    def _sweep_other_jobs(self) -> None:
        """Remove folders of other jobs, but no file that a live process locks and nothing of a live agent."""
        for folder in self._memory_dir.iterdir():
            if folder.name == self.job_id or folder.is_symlink() or not folder.is_dir():
                continue
            try:
                lock = _lock_folder(folder)
            except ConflictError:
                continue
            try:
                for path in folder.iterdir():
                    if path.is_file() and not path.is_symlink():
                        _remove_unless_locked(path)
                if not any(folder.iterdir()):
                    folder.rmdir()
                    _log.info("removed the memory of %s, which no live process uses", folder.name)
            finally:
                os.close(lock)


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        raise ConfigurationError(f"memory_dir {folder} belongs to another user or is a link; choose one of your own")
    folder.chmod(0o700)


def _fits(have: BufferGeometry, need: BufferGeometry) -> bool:
    return have.capacity_bytes >= need.capacity_bytes and have.manifest_capacity_bytes >= need.manifest_capacity_bytes


def _is_own(path: Path) -> bool:
    """Other files in the folder, such as the job page, belong to others."""
    name = path.name.removesuffix(NEW_SUFFIX).removesuffix(_GONE_SUFFIX)
    return name.startswith(PAGE_PREFIX) or _BUFFER_NAME.fullmatch(name) is not None


def _lock_folder(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConflictError(f"another agent of this machine uses {folder}; give each node its own memory_dir") from None
    return descriptor


def _remove(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove_own(folder: Path) -> None:
    if not folder.exists():
        return
    _remove(*(path for path in folder.iterdir() if _is_own(path)))
    if not any(folder.iterdir()):
        folder.rmdir()


def _remove_unless_locked(path: Path) -> None:
    if is_locked(path):
        _log.warning("%s is left alone: a live process locks it", path)
    else:
        path.unlink(missing_ok=True)


def _verify(buffer_file: BufferFile) -> BufferHeader | str | None:
    """Return the header of a good copy, a sentence about a bad one, None for no copy. Runs in a thread."""
    before = buffer_file.header()
    if before is None or before.state is not BufferState.SEALED:
        return None
    try:
        fault_point("store.before_verify")
        header = buffer_file.buffer.verify()
        fault_point("store.after_verify")
        return header
    except (IntegrityError, ProtocolError) as error:
        # A live rank may have begun to fill it meanwhile; that is no damage.
        return str(error) if buffer_file.header() == before else None

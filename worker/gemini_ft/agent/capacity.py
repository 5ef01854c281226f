"""Does the replica memory of a node fit? Asked before training, so that it never ends in SIGBUS or an OOM kill."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gemini_ft.contracts.errors import CapacityError

BUFFERS_PER_REPLICA = 2
"""The newest committed version and the one that is being filled."""

_OVERHEAD_PERCENT = 5
_TMPFS_KNOB = (
    "enlarge it: `mount -o remount,size=...` on a host, `--shm-size` with docker, `sizeLimit` of the "
    "`emptyDir` (medium: Memory) on Kubernetes"
)
_DISK_KNOB = "free some space there, or choose another directory"
_CGROUP_KNOB = "raise it: `--memory` with docker, `resources.limits.memory` on Kubernetes, `MemoryMax=` with systemd"
_MACHINE_KNOB = "run fewer ranks on this node, keep fewer replicas, or use a machine with more memory"


@dataclass(frozen=True)
class CapacityFacts:
    """What a machine has for a replica store in `directory`. None means that there is no such limit."""

    directory: str
    file_system: str
    free_bytes: int | None
    """Free space of the file system that holds `directory`."""
    cgroup_free_bytes: int | None
    """What the tightest memory cgroup of this process still allows; tmpfs pages count in it."""
    available_bytes: int
    """Memory of the machine that can be had without swapping."""

    @property
    def in_memory(self) -> bool:
        return self.file_system in ("tmpfs", "ramfs")


@dataclass(frozen=True)
class CapacityReport:
    """The tightest limit on a need. `message` is a sentence with the numbers, and the knob if it does not fit."""

    need_bytes: int
    have_bytes: int
    fits: bool
    knob: str
    message: str

    def require(self) -> None:
        """Raises CapacityError with `message` if the need does not fit."""
        if not self.fits:
            raise CapacityError(self.message, need_bytes=self.need_bytes, have_bytes=self.have_bytes, knob=self.knob)


def replica_memory_bytes(shard_bytes: int, num_replicas: int, num_ranks: int) -> int:
    """Memory that a node needs: two buffers a replica, for as many shards as it has ranks, and 5 % on top."""
    exact = BUFFERS_PER_REPLICA * num_replicas * shard_bytes * num_ranks
    return exact + -(-exact * _OVERHEAD_PERCENT // 100)


def check_capacity(need_bytes: int, facts: CapacityFacts) -> CapacityReport:
    """Hold `need_bytes`, not counting what the store holds already, against every limit in `facts`."""
    limits = [(facts.free_bytes, f"the {facts.file_system} at {facts.directory}", _TMPFS_KNOB)]
    if facts.in_memory:
        limits.append((facts.cgroup_free_bytes, "the memory limit of this container or unit", _CGROUP_KNOB))
        limits.append((facts.available_bytes, "the memory of this machine", _MACHINE_KNOB))
    else:
        limits[0] = (*limits[0][:2], _DISK_KNOB)
    have_bytes, where, knob = min(
        ((have, where, knob) for have, where, knob in limits if have is not None),
        default=(need_bytes, facts.directory, ""),
    )
    fits = need_bytes <= have_bytes
    message = (
        f"replica memory needs {need_bytes} bytes ({_gib(need_bytes)}), "
        f"and {where} has {have_bytes} bytes ({_gib(have_bytes)}) left"
    )
    return CapacityReport(need_bytes, have_bytes, fits, knob, message if fits else f"{message}; {knob}")


def read_capacity_facts(directory: Path, root: Path = Path("/")) -> CapacityFacts:
    """Read the facts from the kernel; `directory` need not exist yet. `root` is where /proc and /sys are."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    status = os.statvfs(existing)
    return CapacityFacts(
        directory=str(directory),
        file_system=_file_system(existing.resolve(), root),
        free_bytes=status.f_bavail * status.f_frsize if status.f_blocks else None,
        cgroup_free_bytes=_cgroup_free_bytes(root),
        available_bytes=_available_bytes(root),
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _file_system(directory: Path, root: Path) -> str:
    """The type of the innermost mount that holds `directory`."""
    holding = {
        PurePosixPath(target.encode().decode("unicode_escape")): kind
        for _, target, kind, *_ in map(str.split, (root / "proc/mounts").read_text().splitlines())
    }
    for folder in (directory, *directory.parents):
        if PurePosixPath(folder) in holding:
            return holding[PurePosixPath(folder)]
    return "unknown"


def _available_bytes(root: Path) -> int:
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_free_bytes(root: Path) -> int | None:
    """The least that any memory cgroup above this process still allows, under cgroup v1 or v2."""
    free = [limit - used for folder in _cgroup_folders(root) for limit, used in _limit_and_used(folder)]
    return max(0, min(free)) if free else None


def _cgroup_folders(root: Path) -> Iterator[Path]:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        # Inside a container the path may be the host's; the mount itself is then the container's own group.
        inner = mount / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(mount))


def _limit_and_used(folder: Path) -> Iterator[tuple[int, int]]:
    """The limit of one group, if it has one, and what of it is used and cannot be reclaimed at once."""
    for limit_file, usage_file, cache, shared in (
        ("memory.max", "memory.current", "file", "shmem"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / usage_file).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except FileNotFoundError:
            continue
        # cgroup v1 says "unlimited" with a number near 2**63.
        if limit != "max" and int(limit) < 1 << 60:
            yield int(limit), used - (int(statistics.get(cache, 0)) - int(statistics.get(shared, 0)))

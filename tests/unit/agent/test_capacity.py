"""Capacity: the need, the tightest limit, and the facts of cgroup v1, v2 and tmpfs."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini_ft.agent.capacity import (
    CapacityFacts,
    check_capacity,
    read_capacity_facts,
    replica_memory_bytes,
)
from gemini_ft.contracts.errors import CapacityError

_ROOMY = CapacityFacts(
    directory="/dev/shm/gemini", file_system="tmpfs", free_bytes=1000, cgroup_free_bytes=None, available_bytes=1000
)


@given(st.integers(1, 1 << 50), st.integers(1, 8), st.integers(1, 64))
def test_the_need_is_two_buffers_a_replica_and_five_percent(shard: int, replicas: int, ranks: int) -> None:
    exact = 2 * replicas * shard * ranks
    need = replica_memory_bytes(shard, replicas, ranks)
    assert exact * 105 <= need * 100 < exact * 105 + 100


@pytest.mark.parametrize(
    ("change", "have", "knob"),
    [
        ({"free_bytes": 99}, 99, "--shm-size"),
        ({"free_bytes": 99}, 99, "sizeLimit"),
        ({"free_bytes": 99}, 99, "mount -o remount,size="),
        ({"cgroup_free_bytes": 0}, 0, "MemoryMax="),
        ({"available_bytes": 50, "cgroup_free_bytes": 60}, 50, "more memory"),
        ({"file_system": "ext4", "free_bytes": 99}, 99, "another directory"),
    ],
)
def test_the_tightest_limit_is_named_with_its_number_and_knob(
    change: dict[str, int | str], have: int, knob: str
) -> None:
    report = check_capacity(100, dataclasses.replace(_ROOMY, **change))
    assert not report.fits
    with pytest.raises(CapacityError, match=rf"needs 100 bytes .* has {have} bytes") as refused:
        report.require()
    assert knob in str(refused.value)
    assert (refused.value.need_bytes, refused.value.have_bytes, refused.value.knob) == (100, have, report.knob)


def test_a_need_that_just_fits_is_accepted() -> None:
    report = check_capacity(1000, _ROOMY)
    assert report.fits
    report.require()
    assert check_capacity(1 << 40, dataclasses.replace(_ROOMY, free_bytes=None, available_bytes=1 << 41)).fits


def test_memory_limits_do_not_bind_a_directory_on_disk() -> None:
    assert check_capacity(100, dataclasses.replace(_ROOMY, file_system="ext4", available_bytes=1)).fits


def _root(tmp_path: Path, cgroup: str, files: dict[str, str]) -> Path:
    proc = {
        "proc/mounts": f"tmpfs {tmp_path} tmpfs rw 0 0\nrootfs / ext4 rw 0 0\n",
        "proc/meminfo": "MemTotal: 100 kB\nMemAvailable:      64 kB\n",
        "proc/self/cgroup": cgroup,
    }
    for name, text in (proc | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_cgroup_v2_takes_the_tightest_ancestor_and_counts_page_cache_as_free(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup/kube/pod"
    files = {
        f"{groups}/memory.max": "max\n",
        f"{groups}/memory.current": "500\n",
        f"{groups}/memory.stat": "anon 300\nfile 200\nshmem 50\n",
        f"{groups}/../memory.max": "1000\n",
        f"{groups}/../memory.current": "600\n",
        f"{groups}/../memory.stat": "anon 300\nfile 200\nshmem 50\n",
    }
    facts = read_capacity_facts(tmp_path / "not" / "yet", _root(tmp_path, "0::/kube/pod\n", files))
    assert facts.cgroup_free_bytes == 1000 - (600 - (200 - 50))
    assert facts.available_bytes == 64 * 1024
    assert facts.in_memory


def test_cgroup_v1_inside_a_container_falls_back_to_its_mount(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "700\n",
        "sys/fs/cgroup/memory/memory.stat": "cache 1\ntotal_cache 300\ntotal_shmem 100\n",
    }
    root = _root(tmp_path, "5:cpu:/docker/abc\n4:memory:/docker/abc\n", files)
    assert read_capacity_facts(tmp_path, root).cgroup_free_bytes == 2000 - (700 - 200)


def test_cgroup_v1_says_unlimited_with_a_huge_number(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "700\n",
        "sys/fs/cgroup/memory/memory.stat": "total_cache 0\n",
    }
    root = _root(tmp_path, "4:memory:/\n", files)
    assert read_capacity_facts(tmp_path, root).cgroup_free_bytes is None


def test_the_facts_of_this_machine_can_be_read() -> None:
    facts = read_capacity_facts(Path("/dev/shm/absent"))
    assert facts.in_memory
    assert facts.available_bytes > 0

"""Watching and killing real processes that are children of somebody else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest
from agent_harness import SOON_S, eventually

from gemini_ft.agent.rank_watch import ProcessWatch, identify
from gemini_ft.agent.records import ProcessIdentity

SOON = timedelta(seconds=SOON_S)

# A parent that reaps its child at once, so that only a pidfd still knows the exit code.
_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(int(sys.stdin.readline()))"], stdin=0)
print(child.pid, flush=True)
child.wait()
"""


class Grandchild:
    def __init__(self) -> None:
        self.parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.parent.stdout is not None
        self.identity = identify(int(self.parent.stdout.readline()))

    def exit(self, code: int) -> None:
        assert self.parent.stdin is not None
        self.parent.stdin.write(f"{code}\n".encode())
        self.parent.stdin.flush()

    def close(self) -> None:
        with self.parent:
            self.parent.kill()
            if identify(self.identity.pid) == self.identity:
                os.kill(self.identity.pid, signal.SIGKILL)


@pytest.fixture
def grandchild() -> Iterator[Grandchild]:
    process = Grandchild()
    yield process
    process.close()


Ended = list[tuple[ProcessIdentity, int | None]]


@pytest.fixture
async def watching() -> AsyncIterator[tuple[ProcessWatch, Ended]]:
    ended: Ended = []
    watch = ProcessWatch(lambda process, code: ended.append((process, code)))
    yield watch, ended
    watch.close()


async def test_an_exit_is_told_once_with_its_code(watching: tuple[ProcessWatch, Ended], grandchild: Grandchild) -> None:
    watch, ended = watching
    watch.watch(grandchild.identity)
    watch.watch(grandchild.identity)
    grandchild.exit(3)
    await eventually("the exit", lambda: ended)
    assert ended == [(grandchild.identity, 3)]
    assert not watch.is_watched(grandchild.identity)


async def test_a_stopped_process_dies_of_the_kill(watching: tuple[ProcessWatch, Ended], grandchild: Grandchild) -> None:
    watch, ended = watching
    os.kill(grandchild.identity.pid, signal.SIGSTOP)
    assert await watch.end([grandchild.identity], SOON) == []
    assert ended == [(grandchild.identity, -signal.SIGKILL)]


async def test_waiting_for_a_process_that_lives_is_bounded(
    watching: tuple[ProcessWatch, Ended], grandchild: Grandchild
) -> None:
    watch, ended = watching
    watch.watch(grandchild.identity)
    assert await watch.wait_ended([grandchild.identity], timedelta(milliseconds=20)) == [grandchild.identity]
    assert ended == []


async def test_a_process_that_has_the_pid_now_is_left_alone(
    watching: tuple[ProcessWatch, Ended], grandchild: Grandchild
) -> None:
    watch, ended = watching
    former = grandchild.identity.model_copy(update={"started": "former-boot/1"})
    assert await watch.end([former], SOON) == []
    await eventually("the end of the former process", lambda: ended)
    assert ended == [(former, None)]
    assert identify(grandchild.identity.pid) == grandchild.identity


async def test_a_process_that_was_gone_already_counts_as_ended(watching: tuple[ProcessWatch, Ended]) -> None:
    watch, ended = watching
    child = await asyncio.create_subprocess_exec("true")
    await child.wait()
    gone = identify(child.pid)
    assert gone.started == ""
    watch.watch(gone)
    await eventually("the end to be told", lambda: ended)
    assert ended == [(gone, None)]

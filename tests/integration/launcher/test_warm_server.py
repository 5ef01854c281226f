"""Warm servers with real processes; plain scripts, so that no test waits for torch."""

from __future__ import annotations

import logging
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from gemini_ft.agent.launcher.cold_start import ColdStarter
from gemini_ft.agent.launcher.entry import RankOrder
from gemini_ft.agent.launcher.rank_process import RankProcess, RankStarter
from gemini_ft.agent.launcher.warm_server import WarmStarter
from gemini_ft.contracts.errors import UnavailableError

REPORTED = "reported.json"


def wait_for(what: str, is_true: Callable[[], object], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class Ranks:
    """Starts scripts as ranks and reads their logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starters: list[RankStarter] = []

    def warm(self, *base: str, learned: Path | None = None) -> WarmStarter:
        starter = WarmStarter(self.folder, learned, self.folder / REPORTED, base)
        self.starters.append(starter)
        return starter

    def order(self, script: str, *arguments: str) -> RankOrder:
        path = self.folder / f"script-{len(list(self.folder.iterdir()))}.py"
        path.write_text(textwrap.dedent(script))
        environ = {**os.environ, "GEMINI_FT_LEARNED_IMPORTS": str(self.folder / REPORTED)}
        return RankOrder(str(path), False, list(arguments), environ, str(path.with_suffix(".log")), str(self.folder))

    def run(self, starter: RankStarter, order: RankOrder) -> tuple[int, str]:
        """Start a rank, wait for its end, and return its exit code and log."""
        rank = starter.start(order)
        wait_for("the rank's end", lambda: rank.poll() is not None)
        code = rank.poll()
        assert code is not None
        return code, log_of(order)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    for starter in ranks.starters:
        starter.close()


@pytest.fixture(params=["warm", "cold"])
def starter(request: pytest.FixtureRequest, ranks: Ranks) -> RankStarter:
    if request.param == "warm":
        return ranks.warm()
    ranks.starters.append(ColdStarter())
    return ranks.starters[-1]


def test_a_rank_finds_what_a_plain_script_would(ranks: Ranks, starter: RankStarter) -> None:
    code, log = ranks.run(
        starter,
        order := ranks.order(
            """
            import multiprocessing, os, sys
            print(__name__, __file__ == sys.argv[0], sys.argv[1:], sys.path[0] == os.path.dirname(__file__))
            print(os.getcwd(), multiprocessing.parent_process(), multiprocessing.current_process().name)
            print("to stderr", file=sys.stderr)
            import atexit; atexit.register(print, "at exit")
            sys.exit(7)
            """,
            "--flag",
            "a b",
        ),
    )
    assert code == 7
    assert "__main__ True ['--flag', 'a b'] True" in log
    assert f"{order.work_dir} None MainProcess" in log
    assert "to stderr" in log
    assert "at exit" in log


def test_an_exception_leaves_its_traceback_in_the_log(ranks: Ranks, starter: RankStarter) -> None:
    code, log = ranks.run(starter, ranks.order("def broken():\n    raise ValueError('seen by nobody else')\nbroken()"))
    assert code == 1
    assert "in broken" in log
    assert "ValueError: seen by nobody else" in log


def test_a_script_may_start_processes_of_its_own(ranks: Ranks, starter: RankStarter) -> None:
    code, log = ranks.run(
        starter,
        ranks.order(
            """
            import multiprocessing
            def double(x):
                return 2 * x
            if __name__ == "__main__":
                for method in ("spawn", "fork", "forkserver"):
                    with multiprocessing.get_context(method).Pool(1) as pool:
                        print(method, pool.map(double, [21]))
            """
        ),
    )
    assert code == 0, log
    assert log.split("\n")[:3] == ["spawn [42]", "fork [42]", "forkserver [42]"]


def log_of(order: RankOrder) -> str:
    path = Path(order.log_path)
    return path.read_text() if path.exists() else ""


def _started(ranks: Ranks, starter: RankStarter, script: str) -> tuple[RankProcess, RankOrder]:
    order = ranks.order(script)
    rank = starter.start(order)
    wait_for("the rank's first line", lambda: "ready" in log_of(order))
    return rank, order


_DEAF = """
    import os, signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"])
    print("ready", child.pid)
    time.sleep(1000)
"""


def test_a_kill_ends_a_deaf_rank_and_what_it_started(ranks: Ranks, starter: RankStarter) -> None:
    rank, order = _started(ranks, starter, _DEAF)
    child_pid = int(log_of(order).split()[1])
    rank.kill()
    wait_for("the rank's end", lambda: rank.poll() is not None)
    assert rank.poll() == -signal.SIGKILL
    wait_for("its child's end", lambda: is_gone(child_pid))
    rank.kill()


def test_a_rank_that_dies_takes_what_it_started_along(ranks: Ranks, starter: RankStarter) -> None:
    rank, order = _started(ranks, starter, _DEAF)
    child_pid = int(log_of(order).split()[1])
    os.kill(rank.pid, signal.SIGKILL)
    wait_for("the rank's end", lambda: rank.poll() is not None)
    wait_for("its child's end", lambda: is_gone(child_pid))


def test_what_a_rank_imports_is_there_for_the_next_while_the_old_one_lives(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    learned = tmp_path / "learned.json"
    starter = ranks.warm("json", learned=learned)
    assert starter.wants_report
    script = """
        import sys, time
        print("at entry:", "json" in sys.modules, "colorsys" in sys.modules)
        import colorsys
        from gemini_ft.agent.launcher.learning import report_imports
        report_imports()
        print("ready")
        time.sleep(1000)
    """
    first, order = _started(ranks, starter, script)
    assert "at entry: True False" in log_of(order)

    def has_learned() -> bool:
        starter.poll()
        return "colorsys" in starter.preload

    wait_for("the server that has learned", has_learned)
    assert not starter.wants_report, "one report is enough"
    second, order = _started(ranks, starter, script)
    assert "at entry: True True" in log_of(order)
    assert first.poll() is None
    starter.poll()
    assert not (tmp_path / REPORTED).exists()
    assert caplog.text.count("preparing a warm server") == 1, "the second report taught something new"
    old_server, new_server = (psutil.Process(rank.pid).ppid() for rank in (first, second))
    assert old_server != new_server

    first.kill()
    wait_for("the old server's end with its last rank", lambda: first.poll() is not None and is_gone(old_server))
    assert second.poll() is None

    later = ranks.warm("json", learned=learned)
    _, order = _started(ranks, later, script)
    assert "at entry: True True" in log_of(order)


def test_imports_that_fail_are_skipped(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises.py").write_text("raise RuntimeError('not today')")
    (tmp_path / "exits.py").write_text("import sys; sys.exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    starter = ranks.warm("raises", "exits", "no_such_module", "colorsys")
    code, log = ranks.run(starter, ranks.order("import sys; print('colorsys' in sys.modules)"))
    assert (code, log) == (0, "True\n")


def test_a_server_with_threads_is_not_forked(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(1e6,)).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    learned = tmp_path / "learned.json"
    learned.write_text('{"modules": ["threaded"]}')
    starter = ranks.warm("colorsys", learned=learned)
    with caplog.at_level(logging.WARNING):
        code, log = ranks.run(
            starter, ranks.order("import sys; print('threaded' in sys.modules, 'colorsys' in sys.modules)")
        )
    assert (code, log) == (0, "False True\n")
    assert "imports started 1 threads" in caplog.text
    starter.learn(["threaded"])
    starter.poll()
    assert starter.preload == ("colorsys",)
    assert not learned.exists()


def test_a_learned_server_with_threads_does_not_take_over(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(1e6,)).start()"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    starter = ranks.warm("colorsys")
    assert ranks.run(starter, ranks.order("print('first')")) == (0, "first\n")
    starter.learn(["threaded"])

    def is_refused() -> bool:
        starter.poll()
        return "staying with the old one" in caplog.text

    wait_for("the refusal", is_refused)
    assert starter.preload == ("colorsys",)
    assert ranks.run(starter, ranks.order("print('second')")) == (0, "second\n")


def test_an_import_that_kills_the_server_costs_only_its_warmth(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    starter = ranks.warm("deadly")
    assert ranks.run(starter, ranks.order("print('alive')")) == (0, "alive\n")


def test_a_killed_server_takes_its_ranks_along_and_is_replaced(ranks: Ranks) -> None:
    starter = ranks.warm("colorsys")
    rank, _ = _started(ranks, starter, _DEAF)
    os.kill(psutil.Process(rank.pid).ppid(), signal.SIGKILL)
    wait_for("the rank's end", lambda: rank.poll() is not None)
    assert rank.poll() == -signal.SIGKILL
    wait_for("its process's end", lambda: is_gone(rank.pid))
    code, log = ranks.run(starter, ranks.order("import sys; print('colorsys' in sys.modules)"))
    assert (code, log) == (0, "True\n")


def test_forked_ranks_draw_different_numbers(ranks: Ranks) -> None:
    starter = ranks.warm("numpy.random")
    script = "import random, numpy; print(random.random(), numpy.random.rand())"
    _, first = ranks.run(starter, ranks.order(script))
    _, second = ranks.run(starter, ranks.order(script))
    assert not set(first.split()) & set(second.split())


def test_an_interpreter_that_cannot_start_is_an_error(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    starter = ranks.warm("json")
    with pytest.raises(UnavailableError, match="no warm server can be started"):
        starter.start(ranks.order("print()"))

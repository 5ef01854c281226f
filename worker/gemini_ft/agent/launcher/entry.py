"""What a process does to become a rank: it runs the user's script as `python script.py` would."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
from dataclasses import asdict, dataclass

__all__ = ["RankOrder", "become_rank", "die_with_parent", "run_target"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Everything that a rank is started with. `target` is a script's path, or a module's name if `is_module`."""

    target: str
    is_module: bool
    arguments: list[str]
    environ: dict[str, str]
    log_path: str
    work_dir: str

    def to_json(self) -> str:
        """Return the order as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankOrder:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies, whichever way; also if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def become_rank(order: RankOrder, parent_pid: int) -> None:
    """Give this process the life, session, output, environment and working directory of the ordered rank."""
    die_with_parent(parent_pid)
    # A group of its own: what the script starts (data loader workers) is killed with it.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(order.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        # A killed rank flushes nothing, so its log must not lag by more than a line.
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(order.work_dir)
    os.environ.clear()
    os.environ.update(order.environ)
    faulthandler.enable()
    if "numpy.random" in sys.modules:
        # Legacy global state: forked ranks would all draw the same numbers where fresh processes draw different ones.
        sys.modules["numpy.random"].seed()
    gc.enable()


def run_target(order: RankOrder) -> None:
    """Run the script or module as `__main__`; its exceptions, SystemExit too, pass through to the interpreter."""
    sys.argv = [order.target, *order.arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, order.work_dir if order.is_module else os.path.dirname(os.path.abspath(order.target)))
    if order.is_module:
        runpy.run_module(order.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(order.target, run_name="__main__")

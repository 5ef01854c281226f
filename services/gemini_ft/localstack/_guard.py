"""Cleans up after a local stack, also when the process that owned it was killed.

Started as `python -m gemini_ft.localstack._guard`; it waits for the end of its standard input, which the kernel
brings about however the owner ends, then SIGKILLs every process of the run and removes its folders.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from gemini_ft.localstack.processes import Marker, kill_marked

_SWEEP_TIMEOUT_S = 20.0


class Guard:
    """Owner's side: while this object is open nothing is removed; `close` returns when all of it is gone."""

    def __init__(self, marker: Marker, folders: list[Path]) -> None:
        argv = [sys.executable, "-m", __spec__.name, "--run", marker.run_id, *map(str, folders)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        self._process.communicate(timeout=2 * _SWEEP_TIMEOUT_S)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("folders", nargs="*", type=Path)
    arguments = parser.parse_args()
    sys.stdin.read()
    try:
        kill_marked(Marker(arguments.run), _SWEEP_TIMEOUT_S)
    finally:
        for folder in arguments.folders:
            if folder.exists():
                shutil.rmtree(folder)


if __name__ == "__main__":
    _main()

"""Run the benchmarks one after another: `python -m benchmarks [--only NAME ...] [--json-dir DIR]`."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from pathlib import Path

NAMES = ("staging", "replication", "recovery", "simulation", "api")


def main() -> int:
    """Run each benchmark in a process of its own; the exit code is 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=(*NAMES, "warm_restart"), default=NAMES)
    parser.add_argument("--json-dir", type=Path, help="folder for one JSON file a benchmark")
    args = parser.parse_args()
    print(
        f"commit {_commit()}, {os.cpu_count()} CPUs, {platform.platform()}, load {os.getloadavg()[0]:.1f}", flush=True
    )
    failed = []
    for name in args.only:
        print(f"\n== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if args.json_dir is not None:
            args.json_dir.mkdir(parents=True, exist_ok=True)
            command += ["--json", str(args.json_dir / f"{name}.json")]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())

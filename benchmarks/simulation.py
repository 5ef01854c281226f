"""How long the simulator takes: 1,000 machines x 30 days x 100 seeds, larger clusters, and the cost of one failure.

The job is the preset `paper-p4d-100b` with 1.5 % of the machines failing a day, half of them in hardware.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from gemini_ft.planning.simulation.policies import GeminiFT
from gemini_ft.planning.simulation.presets import DEMO_RECOVERY, at_size, preset
from gemini_ft.planning.simulation.run import run_scenario
from gemini_ft.planning.simulation.scenario import PoissonFailures, Scenario

_LIMIT_S = 20.0
_SEEDS_AT_SIZE = {1000: 100, 10_000: 20, 100_000: 4}
_RATES = (0.0075, 0.015, 0.03, 0.06)


def scenario(num_machines: int, per_machine_per_day: float = 0.015) -> Scenario:
    """The benchmark's job, under Gemini-FT with measured phases."""
    return at_size(preset("paper-p4d-100b"), num_machines).changed(
        failures=(
            PoissonFailures(failure="software", per_machine_per_day=per_machine_per_day / 2),
            PoissonFailures(failure="hardware", per_machine_per_day=per_machine_per_day / 2),
        ),
        policy=GeminiFT(measured=DEMO_RECOVERY),
    )


def measure(simulated: Scenario, num_seeds: int, num_processes: int) -> dict[str, float]:
    """Simulate, and return the wall time and what was done in it."""
    began = time.perf_counter()
    summary = run_scenario(simulated, num_seeds, num_processes=num_processes)
    wall_s = time.perf_counter() - began
    num_failures = num_seeds * sum(kind.mean for kind in summary.num_failures.values())
    return {
        "num_seeds": num_seeds,
        "num_failures": num_failures,
        "wall_s": wall_s,
        "us_per_failure": wall_s * num_processes / num_failures * 1e6,
        "effective_time_ratio": summary.effective_time_ratio.mean,
    }


def main() -> int:
    """Measure, print a table, and write JSON if asked; the exit code is 1 if the limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = {
        f"{num_machines} machines": measure(scenario(num_machines), num_seeds, args.processes)
        for num_machines, num_seeds in _SEEDS_AT_SIZE.items()
    }
    # In this process alone, so that starting others does not count.
    rates = {f"{rate:.2%} of 1000 a day": measure(scenario(1000, rate), 20, 1) for rate in _RATES}
    print(f"30 days, {args.processes} processes; the rates below in one process")
    for name, row in (sizes | rates).items():
        print(
            f"  {name:24} {row['num_seeds']:4.0f} seeds {row['num_failures']:8.0f} failures {row['wall_s']:7.2f} s "
            f"{row['us_per_failure']:6.0f} us a failure  ratio {row['effective_time_ratio']:.4f}"
        )
    needed_s = sizes["1000 machines"]["wall_s"]
    print(f"  1000 machines x 30 days x 100 seeds: {needed_s:.1f} s, limit {_LIMIT_S:.0f} s")
    if args.json is not None:
        args.json.write_text(json.dumps({"sizes": sizes, "rates": rates}, indent=1) + "\n")
    return int(needed_s > _LIMIT_S)


if __name__ == "__main__":
    raise SystemExit(main())

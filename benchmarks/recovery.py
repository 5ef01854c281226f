"""From a failure to the next finished step, on the whole product: four ranks of DeepSpeed ZeRO-3, m = 2, one standby.

The same restart is measured with the warm server that has learned its imports and with ranks started cold; a lost
machine is measured with the warm server.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

from gemini_ft.contracts.messages import JobSpec
from gemini_ft.localstack.demo.demo import find_example
from gemini_ft.localstack.demo.losses import LossLogs
from gemini_ft.localstack.demo.observe import JobObserver
from gemini_ft.localstack.demo.records import DrillRecord
from gemini_ft.localstack.demo.scenario import Drill, Stage, kill_rank, lose_node
from gemini_ft.localstack.stack import LocalStack

_NUM_NODES = 4
_STEPS_WITHOUT_END = 1_000_000
_START_TIMEOUT_S = 300.0
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


class _ColdStage(Stage):
    """Ranks that are started cold have nothing to be warm about."""

    def wait_warm(self) -> None:
        """See Stage."""


def measure(start_method: str, num_rank_kills: int, num_node_losses: int) -> dict[str, list[DrillRecord]]:
    """Train on a stack of its own, break it again and again, and return what each failure cost."""
    found: dict[str, list[DrillRecord]] = {"rank killed": [], "machine lost": []}
    with LocalStack(num_nodes=_NUM_NODES + 1, env=_ENVIRONMENT) as stack, stack.client() as client:
        out = stack.directory / "bench"
        script = [str(find_example("train_gpt_deepspeed.py")), "--steps", str(_STEPS_WITHOUT_END)]
        job = client.create_job(
            JobSpec(
                name=f"recovery-{start_method}",
                command=(*script, "--loss-log", f"{out}.losses"),
                working_directory=str(stack.directory),
                environment={**_ENVIRONMENT, "GEMINI_FT_START_METHOD": start_method},
                num_nodes=_NUM_NODES,
                num_ranks_per_node=1,
                num_replicas=2,
                num_standbys=1,
            )
        )
        observer = JobObserver(stack, client, job, LossLogs(Path(f"{out}.losses"), _NUM_NODES))
        kind = _ColdStage if start_method == "cold" else Stage
        stage = kind(stack, client, observer, on_look=lambda: None)
        stage.wait(lambda: observer.losses.last_step >= 0, "the first step", _START_TIMEOUT_S)
        stage.wait(lambda: _num_standbys(observer) == 1, "the standby", _START_TIMEOUT_S)
        for number in range(num_rank_kills):
            found["rank killed"].append(_perform(stage, kill_rank(number % _NUM_NODES)))
        for number in range(num_node_losses):
            found["machine lost"].append(_perform(stage, lose_node(number % _NUM_NODES)))
            stack.add_node()
            stage.wait(lambda: _num_standbys(observer) == 1, "a new standby", _START_TIMEOUT_S)
    return found


def _perform(stage: Stage, break_it: Callable[[Stage, Drill], DrillRecord]) -> DrillRecord:
    return break_it(stage, Drill("bench", "benchmark", break_it))


def _num_standbys(observer: JobObserver) -> int:
    job = observer.job
    return sum(node.is_alive and node.job_id == job.job_id for node in observer.nodes) - len(job.slots)


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank-kills", type=int, default=5)
    parser.add_argument("--node-losses", type=int, default=3)
    parser.add_argument("--cold-kills", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    learned = measure("learn", args.rank_kills, args.node_losses)
    cold = measure("cold", args.cold_kills, 0)
    rows = {
        "rank killed, warm": learned["rank killed"],
        "machine lost, warm standby": learned["machine lost"],
        "rank killed, cold start": cold["rank killed"],
    }
    print("seconds from SIGKILL to the end of the next step on all ranks")
    for name, records in rows.items():
        values = [record.step_after_ms / 1000 for record in records if record.step_after_ms is not None]
        lost = max((record.num_steps_lost or 0 for record in records), default=0)
        if values:
            print(
                f"  {name:28} median {statistics.median(values):5.2f} [{min(values):.2f}-{max(values):.2f}] "
                f"n={len(values)}, steps lost at most {lost}"
            )
    if args.json is not None:
        about = {"cpus": os.cpu_count(), "load": os.getloadavg(), "platform": platform.platform()}
        drills = {name: [record.model_dump() for record in records] for name, records in rows.items()}
        args.json.write_text(json.dumps({"about": about, "drills": drills}, indent=1) + "\n")


if __name__ == "__main__":
    main()

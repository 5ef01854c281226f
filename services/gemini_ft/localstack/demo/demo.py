"""The demo: the disturbed run, the undisturbed run, and the comparison."""

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from gemini_ft.contracts.errors import ConfigurationError, UnavailableError
from gemini_ft.contracts.messages import JobOutcome, JobSpec
from gemini_ft.localstack.demo.losses import LossLogs, differing_steps
from gemini_ft.localstack.demo.observe import JobObserver
from gemini_ft.localstack.demo.records import ALL_RANKS, DemoRecord, DrillRecord, StallRecord
from gemini_ft.localstack.demo.scenario import DRILLS, Drill, DrillFailedError, Stage
from gemini_ft.localstack.demo.view import DemoView
from gemini_ft.localstack.processes import ManagedProcess
from gemini_ft.localstack.stack import LocalStack

__all__ = ["DemoSettings", "run_demo"]

_POLL_S = 0.02
_START_TIMEOUT_S = 300.0
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """What is trained, how large the cluster is, and what is broken."""

    num_steps: int
    step_s: float = 0.4
    """A step of the disturbed run takes at least this long, so that a fast machine needs no more steps."""
    example: str = "train_gpt_deepspeed.py"
    drills: tuple[Drill, ...] = DRILLS
    seed: int = 0
    num_nodes: int = 4
    num_standbys: int = 1
    num_replicas: int = 2
    directory: Path | None = None
    """Keeps logs and data; a temporary folder if there is none."""


def run_demo(settings: DemoSettings, view: DemoView, *, before_close: Callable[[LocalStack], None]) -> DemoRecord:
    """Run everything and return what was seen; `before_close` is called while the cluster is still up.

    Raises:
        DrillFailedError: the run did not survive as promised.
        WaitTimeoutError: something that was promised was not seen in time.
    """
    began_at = time.monotonic()
    with ExitStack() as resources:
        view.say(f"starting a cluster of {settings.num_nodes} nodes and {settings.num_standbys} standby")
        num_nodes = settings.num_nodes + settings.num_standbys
        stack = resources.enter_context(LocalStack(settings.directory, num_nodes=num_nodes, env=_ENVIRONMENT))
        observer, drills = _disturbed_run(settings, stack, view)
        digests = _digests(stack.directory / "disturbed.digests")
        view.say("the same training, undisturbed: plain torchrun, no Gemini-FT")
        reference = _undisturbed_run(settings, stack, view)
        record = DemoRecord(
            version=version("gemini-ft"),
            machine=_machine(),
            num_steps=settings.num_steps,
            seed=settings.seed,
            num_ranks=settings.num_nodes,
            num_replicas=settings.num_replicas,
            drills=tuple(drills),
            num_steps_redone=observer.losses.num_redone,
            differing_steps=differing_steps(observer.losses, reference, settings.num_steps),
            digests=digests,
            reference_digests=_digests(stack.directory / "undisturbed.digests"),
            stall=_stall(observer, reference),
            memory=tuple(observer.memory.values()),
            duration_s=time.monotonic() - began_at,
        )
        before_close(stack)
    return record


def find_example(name: str) -> Path:
    """An example's script: of the clone that this module is part of, or installed with it."""
    for folder in (Path(__file__).parents[4] / "examples", Path(sys.prefix) / "share" / "gemini-ft" / "examples"):
        if (folder / name).is_file():
            return folder / name
    raise ConfigurationError(f"the example {name} is missing from this installation; install gemini-ft again")


def _disturbed_run(settings: DemoSettings, stack: LocalStack, view: DemoView) -> tuple[JobObserver, list[DrillRecord]]:
    losses = LossLogs(stack.directory / "disturbed.losses", settings.num_nodes)
    with stack.client() as client:
        view.say(f"training {settings.example} on {settings.num_nodes} ranks, m = {settings.num_replicas}")
        job = client.create_job(_spec(settings, stack.directory / "disturbed"))
        observer = JobObserver(stack, client, job, losses)
        stage = Stage(stack, client, observer, on_look=lambda: view.look(observer))
        stage.wait(lambda: observer.losses.last_step >= 0, "the first step", _START_TIMEOUT_S)
        records = []
        for drill in settings.drills:
            view.say(f"({drill.key}) {drill.title}")
            records.append(drill.perform(stage, drill))
            view.drill_done(records[-1])
        view.say("all drills survived; the training runs to its end")
        stage.wait_end()
    if observer.job.outcome is not JobOutcome.SUCCEEDED:
        raise DrillFailedError(f"the training has {observer.job.phase}: {observer.job.cause}")
    return observer, records


def _spec(settings: DemoSettings, out: Path) -> JobSpec:
    return JobSpec(
        name="demo",
        command=(str(find_example(settings.example)), *_arguments(settings, out), "--pace", str(settings.step_s)),
        working_directory=str(out.parent),
        environment=_ENVIRONMENT,
        num_nodes=settings.num_nodes,
        num_ranks_per_node=1,
        num_replicas=settings.num_replicas,
        num_standbys=settings.num_standbys,
    )


def _arguments(settings: DemoSettings, out: Path) -> list[str]:
    return [
        *("--steps", str(settings.num_steps), "--seed", str(settings.seed)),
        *("--loss-log", f"{out}.losses", "--digest-out", f"{out}.digests"),
    ]


def _undisturbed_run(settings: DemoSettings, stack: LocalStack, view: DemoView) -> LossLogs:
    out = stack.directory / "undisturbed"
    torchrun = ManagedProcess(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(settings.num_nodes), str(find_example(settings.example))),
            *(*_arguments(settings, out), "--no-checkpoint"),
        ],
        name="undisturbed run",
        log_path=out.with_suffix(".log"),
        env={**os.environ, **_ENVIRONMENT, **stack.marker.environment()},
        cwd=stack.directory,
        parent_death_signal=signal.SIGKILL,
    )
    losses = LossLogs(Path(f"{out}.losses"), settings.num_nodes)
    torchrun.start()
    while torchrun.running:
        losses.poll()
        view.look_at_steps(losses.last_step)
        time.sleep(_POLL_S)
    losses.poll()
    if torchrun.returncode:
        raise UnavailableError(f"the undisturbed run ended with status {torchrun.returncode}: {torchrun.log_tail()}")
    return losses


def _digests(path: Path) -> dict[str, str]:
    found = json.loads(path.read_text())
    ranks = {f"rank {rank}": digest for rank, digest in enumerate(found["ranks"])}
    return {ALL_RANKS: found["combined"], **ranks}


def _stall(observer: JobObserver, reference: LossLogs) -> StallRecord | None:
    stalls = observer.stalls.per_step_ms()
    step_s, step_without_s = observer.losses.median_step_s(), reference.median_step_s()
    if not stalls or step_s is None or step_without_s is None:
        return None
    return StallRecord(
        mean_ms=sum(stalls.values()) / len(stalls),
        max_ms=max(stalls.values()),
        step_ms=step_s * 1000,
        step_without_ms=step_without_s * 1000,
    )


def _machine() -> dict[str, str | int]:
    return {
        "system": platform.platform(),
        "python": platform.python_version(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }

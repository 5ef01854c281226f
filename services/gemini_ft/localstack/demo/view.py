"""What people see while the demo runs: a live screen on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gemini_ft.localstack.demo.observe import JobObserver
from gemini_ft.localstack.demo.records import DrillRecord

__all__ = ["DemoView"]

_NUM_EVENTS_SHOWN = 8
_REDRAW_S = 0.2
_PROGRESS_S = 5.0


class DemoView:
    """Shows what the demo says and what its observer sees."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._began_at = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._status = ""
        self._drawn_at = self._told_at = 0.0
        self._told_event = 0

    def __enter__(self) -> "DemoView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Tell what is going on now; it stays on the screen."""
        self._status = text
        self._print(text)

    def drill_done(self, record: DrillRecord) -> None:
        """Tell what a drill has cost, in one line."""
        facts = [
            "" if record.step_after_ms is None else f"next step after {record.step_after_ms:.0f} ms",
            "" if record.num_steps_lost is None else f"{record.num_steps_lost} steps lost",
            "" if record.num_steps_meanwhile is None else f"{record.num_steps_meanwhile} steps meanwhile",
            "" if record.whole_again_ms is None else f"all copies in place after {record.whole_again_ms:.0f} ms",
        ]
        self._print(f"  survived: {record.what}: {', '.join(fact for fact in facts if fact)}")

    def look(self, observer: JobObserver) -> None:
        """Show the newest observation, as often as an eye needs it."""
        now = time.monotonic()
        if self._live is None:
            self._tell_progress(observer, now)
        elif now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            self._live.update(render(observer, self._num_steps, self._status), refresh=True)

    def look_at_steps(self, last_step: int) -> None:
        """Show how far a run without observer is."""
        now = time.monotonic()
        if now - self._told_at >= _PROGRESS_S:
            self._told_at = now
            self._print(f"  step {last_step + 1} of {self._num_steps}")

    def _tell_progress(self, observer: JobObserver, now: float) -> None:
        for event in observer.events:
            if event.id > self._told_event:
                self._told_event = event.id
                self._print(f"  {_named(event.summary, observer)}")
        if now - self._told_at >= _PROGRESS_S:
            self._told_at = now
            losses = observer.losses
            self._print(
                f"  step {losses.last_step + 1} of {self._num_steps}, version {losses.committed_step} committed"
            )

    def _print(self, text: str) -> None:
        line = Text(f"[{time.monotonic() - self._began_at:6.1f} s] {text}")
        self._console.print(line, no_wrap=True, overflow="ellipsis")


def render(observer: JobObserver, num_steps: int, status: str) -> RenderableType:
    """The live screen: job, nodes, newest events."""
    job, losses = observer.job, observer.losses
    plane = "control plane answers" if observer.api_answers else "control plane does not answer"
    head = Text.assemble(
        (f"step {losses.last_step + 1}/{num_steps}", "bold"),
        f"  committed {losses.committed_step}  generation {job.generation}  {job.phase}  ",
        (plane, "green" if observer.api_answers else "bold red"),
    )
    return Group(Text(status, style="bold cyan"), head, _nodes(observer), _events(observer))


def _nodes(observer: JobObserver) -> Table:
    table = Table("node", "slot", "agent", "rank", "process", "finished", "all copies of", "stall a step", "memory")
    stalls = observer.stalls.per_step_ms()
    for node in sorted(observer.nodes, key=lambda node: node.name):
        ranks = [rank for rank in node.ranks if rank.generation == observer.job.generation]
        memory = observer.memory.get(node.name)
        table.add_row(
            node.name,
            "standby" if node.slot is None else str(node.slot),
            Text(node.status, style="green" if node.is_alive else "bold red"),
            ", ".join(str(rank.rank) for rank in ranks),
            ", ".join(f"{rank.pid} {rank.state}" for rank in ranks),
            ", ".join(_shown(rank.finished_step) for rank in ranks),
            ", ".join(_shown(rank.sealed_everywhere_step) for rank in ranks),
            ", ".join(f"{stalls[rank.rank]:.1f} ms" for rank in ranks if rank.rank in stalls),
            "-" if memory is None else f"{memory.used_bytes >> 20} MiB, {memory.share:.0%}",
        )
    return table


def _shown(step: int | None) -> str:
    return "-" if step is None else str(step)


def _events(observer: JobObserver) -> Text:
    lines = [_named(event.summary, observer) for event in observer.events[-_NUM_EVENTS_SHOWN:]]
    return Text("\n".join(lines), style="dim", no_wrap=True, overflow="ellipsis")


def _named(text: str, observer: JobObserver) -> str:
    """Put the names that people know in place of node ids."""
    for node in observer.nodes:
        text = text.replace(node.node_id, node.name)
    return text

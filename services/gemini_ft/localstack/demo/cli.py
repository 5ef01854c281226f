"""`gemini-ft demo`."""

import time
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]

_DEFAULT_STEPS = 120
_PLAIN_WIDTH = 160


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training; the drills need about 100.")] = _DEFAULT_STEPS,
    seed: Annotated[int, typer.Option(help="Of model, data and dropout.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all that was seen to this file.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--directory", "-d", help="Keep logs and data in this new folder.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the cluster up at the end, until Ctrl-C.")] = False,
) -> None:
    """Train, break things, recover, and compare with the undisturbed run, bit for bit.

    Exit code 0 only if every loss and the final model and optimizer state are identical.
    """
    from rich.console import Console

    from gemini_ft.localstack.demo.demo import DemoSettings, run_demo
    from gemini_ft.localstack.demo.report import render_report
    from gemini_ft.localstack.demo.view import DemoView
    from gemini_ft.localstack.stack import LocalStack

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    settings = DemoSettings(num_steps=steps, seed=seed, directory=directory)

    def before_close(stack: LocalStack) -> None:
        if keep:
            view.say(f"the cluster stays up until Ctrl-C: {stack.url}/v1, token file {stack.api_token_file}")
            _wait_for_interrupt()

    with DemoView(console, steps) as view:
        record = run_demo(settings, view, before_close=before_close)
    console.print(render_report(record))
    if json is not None:
        json.write_text(record.model_dump_json(indent=1) + "\n")
    if not record.success:
        raise typer.Exit(1)


def _wait_for_interrupt() -> None:
    try:
        while True:
            time.sleep(60)
    except KeyboardInterrupt:
        return

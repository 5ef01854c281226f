"""A progress bar on stderr, if somebody looks at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]


@contextmanager
def progress(num_steps: int) -> Iterator[Callable[[str, int], None]]:
    """Yield a function that takes what is being done and how many steps have just been finished.

    Nothing is shown, and nothing imported, where stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda doing, num_finished: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_steps)
        yield lambda doing, num_finished: bar.update(task, description=doing, advance=num_finished)

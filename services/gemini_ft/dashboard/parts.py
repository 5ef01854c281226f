"""Parts that several pages are made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from nicegui import ui
from nicegui.element import Element

from gemini_ft.dashboard.actions import Action, confirm
from gemini_ft.dashboard.dashboard import Visit

__all__ = ["ActionBar", "Rebuilt", "heading", "panel"]


@contextmanager
def panel(title: str, classes: str = "") -> Iterator[Element]:
    """A part of a page with a heading."""
    with ui.element("section").classes(f"panel {classes}").props(f'aria-label="{title}"') as section:
        heading(title, 2)
        yield section


def heading(text: str, level: int) -> ui.label:
    """A heading whose text may change."""
    return ui.label(text).props(f'role="heading" aria-level="{level}"').classes(f"h{level}")


class Rebuilt:
    """A place of a page that is made anew only if what it depends on has changed, so that nobody loses the focus."""

    def __init__(self, classes: str = "") -> None:
        self._container = ui.element("div").classes(classes)
        self._key: Hashable = object()

    def show(self, key: Hashable, build: Callable[[], None]) -> None:
        """See that the place is as `build` makes it for `key`."""
        if key != self._key:
            self._key = key
            self._container.clear()
            with self._container:
                build()


class ActionBar:
    """Buttons for what can be done now; none for viewers."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._place = Rebuilt("actions")

    def show(self, whose: str, actions: Sequence[Action], *, allowed: bool) -> None:
        """Offer `actions`, which are about `whose`."""
        offered = tuple(actions) if allowed else ()

        def build() -> None:
            for action in offered:
                button = ui.button(action.label, on_click=lambda _, chosen=action: confirm(self._visit, chosen))
                button.props("outline no-caps dense padding='2px 10px'")

        self._place.show((whose, tuple(action.question for action in offered)), build)

"""What is around the contents of every page: navigation, how old the data are, theme, and who is logged in."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Iterator

from nicegui import ui

from gemini_ft.dashboard.dashboard import Visit
from gemini_ft.dashboard.feed_state import Freshness
from gemini_ft.dashboard.words import duration

__all__ = ["frame", "stale_sentence", "title_of"]

_TICK_S = 0.25
_PAGES = {"/": "Cluster", "/recoveries": "Recoveries", "/events": "Events", "/simulator": "Simulator"}
_DARK = {"auto": None, "light": False, "dark": True}


def title_of(page: str) -> str:
    """Return a page's title as the browser shows it."""
    return f"{page} - Gemini-FT"


def stale_sentence(freshness: Freshness) -> str:
    """Return what is to be said of old data; empty when they are new."""
    if not freshness.is_stale:
        return ""
    why = f": {freshness.why}" if freshness.why else ""
    if freshness.age_s is None:
        return f"There are no data yet{why}"
    return f"Data are {duration(round(freshness.age_s))} old{why}"


@contextlib.contextmanager
def frame(visit: Visit, path: str, title: str) -> Iterator[None]:
    """Put what is made in this context into a page. While somebody has it open, its visit's `shows` are called with
    every new state.
    """
    ui.page_title(title_of(title))
    dark = ui.dark_mode(_DARK[visit.session.theme])
    with ui.header(wrap=True).classes("bar"):
        ui.label("Gemini-FT").classes("brand")
        with ui.element("nav").props('aria-label="Pages"'):
            for target, name in _PAGES.items():
                ui.link(name, target).props('aria-current="page"' if target == path else "")
        caller = visit.session.caller
        bound = "" if caller.job_ids is None else f", {len(caller.job_ids)} jobs"
        ui.label(f"{caller.name} ({caller.role}{bound})").classes("who")

        def change_theme(theme: str) -> None:
            visit.session.theme = theme
            dark.value = _DARK[theme]

        themes = ui.select(list(_DARK), value=visit.session.theme, on_change=lambda event: change_theme(event.value))
        themes.props('dense options-dense borderless aria-label="Theme"')
        with ui.element("form").props('method="post" action="/logout"'):
            ui.button("Log out").props('type="submit" flat dense no-caps')
    with ui.element("div").classes("page") as content:
        with ui.element("div").props('role="status" aria-live="polite"').classes("stale") as status:
            notice = ui.label().classes("notice")
        status.visible = False
        yield
    ui.skip_link("Skip to the page's content", target=content)
    seen = -1

    async def tick() -> None:
        nonlocal seen
        way_out = visit.dashboard.way_out(visit)
        if way_out is not None:
            timer.cancel()
            ui.navigate.to(way_out)
            return
        state = visit.feed.state
        said = stale_sentence(state.freshness(time.monotonic()))
        if notice.text != said:
            notice.text = said
            status.visible = bool(said)
        if state.version != seen or visit.is_wanted:
            seen, visit.is_wanted = state.version, False
            for show in visit.shows:
                shown = show(state)
                if inspect.isawaitable(shown):
                    await shown

    timer = ui.timer(_TICK_S, tick)

"""Debian's Chromium, driven by Playwright, and what the dashboard's tests do in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from gemini_ft.localstack.waiting import wait_until

__all__ = ["PATIENCE_MS", "SCREENSHOTS", "Visitor", "chromium", "visitor"]

PATIENCE_MS = 60_000
REQUIRED_VARIABLE = "GEMINI_FT_REQUIRE_BROWSER"
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for as long as the context is open; the test is skipped where there is none, unless one is required."""
    path = shutil.which("chromium")
    if path is None:
        why = "there is no chromium on the path; install Debian's package `chromium` to run the dashboard's tests"
        if os.environ.get(REQUIRED_VARIABLE):
            pytest.fail(f"{why} ({REQUIRED_VARIABLE} is set)")
        pytest.skip(why)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, headless=True, args=list(_ARGUMENTS), chromium_sandbox=False
        )
        yield browser
        browser.close()


class Visitor:
    """Somebody with a browser of his own in front of the dashboard."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.hosts: set[str] = set()
        self.errors: list[str] = []
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("websocket", lambda socket: self.hosts.add(urlsplit(socket.url).netloc))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda line: self.errors.append(line.text) if line.type == "error" else None)

    def go(self, path: str = "/") -> None:
        """Open a page."""
        self.page.goto(f"{self.url}{path}")

    def log_in(self, token: str) -> None:
        """Present a token until the API takes it, which it does not in time on a machine that is too busy."""
        wait_until(lambda: self._is_let_in(token), "the API to take the token", PATIENCE_MS / 1000)
        expect(self.page.get_by_role("heading", name="Cluster", exact=True)).to_be_visible(timeout=PATIENCE_MS)

    def _is_let_in(self, token: str) -> bool:
        self.go("/login")
        self.page.get_by_label("Token of the coordinator's API").fill(token)
        with self.page.expect_navigation():
            self.page.get_by_role("button", name="Log in").click()
        return urlsplit(self.page.url).path == "/"

    def sees(self, where: Locator, text: str) -> None:
        """Wait until a text is there."""
        expect(where).to_contain_text(text, timeout=PATIENCE_MS)

    def panel(self, name: str) -> Locator:
        """A part of the page, by its heading."""
        return self.page.get_by_role("region", name=name, exact=True)

    def confirm(self, button: Locator, label: str) -> None:
        """Press a button, and agree to what is asked then."""
        button.click()
        self.page.get_by_role("alertdialog").get_by_role("button", name=label, exact=True).click()

    def keep(self, name: str) -> None:
        """Keep a picture of the whole page among the artefacts."""
        self.page.evaluate("scrollTo(0, 0)")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@contextmanager
def visitor(browser: Browser, url: str) -> Iterator[Visitor]:
    """A visitor whose browser asks nobody but the dashboard, and finds no error in what it gets."""
    context = browser.new_context(viewport={"width": 1360, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    found = Visitor(context.new_page(), url)
    yield found
    context.close()
    assert found.hosts == {urlsplit(url).netloc}
    assert found.errors == []

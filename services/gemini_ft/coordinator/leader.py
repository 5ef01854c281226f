"""Leadership: one coordinator holds an advisory lock in Postgres, on a connection of its own, and acts.

Losing the connection is losing the lock. For a moment two coordinators may both believe that they lead: nothing
breaks, because every transition compares generation and phase, and every order carries its generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import asyncpg

from gemini_ft.coordinator.database import DATABASE_ERRORS
from gemini_ft.coordinator.settings import CoordinatorSettings

__all__ = ["Leadership"]

_log = logging.getLogger("gemini_ft.coordinator.leader")
_LEADER_LOCK = 0x4745_4D46_4C45
# A leader whose machine vanished must not keep the lock for the hours that TCP would wait.
_KEEPALIVES = {"tcp_keepalives_idle": "3", "tcp_keepalives_interval": "2", "tcp_keepalives_count": "3"}


class Leadership:
    """Tries to lead for as long as `run` runs; `on_change` is called whenever `held` changes."""

    def __init__(self, database_url: str, settings: CoordinatorSettings, on_change: Callable[[], None]) -> None:
        self._url = database_url
        self._settings = settings
        self._on_change = on_change
        self._held = False

    @property
    def held(self) -> bool:
        """True while this process leads, as far as it knows."""
        return self._held

    async def run(self) -> None:
        """Take the lock whenever it is free, and notice when it is lost. Runs until it is cancelled."""
        while True:
            try:
                await self._lead_once()
            except DATABASE_ERRORS as error:
                _log.warning("no leadership while Postgres cannot be reached: %s", error)
            finally:
                self._set(False)
            await asyncio.sleep(self._settings.leader_retry.total_seconds())

    async def _lead_once(self) -> None:
        timeout_s = self._settings.database_timeout.total_seconds()
        connection: Any = await asyncpg.connect(
            self._url, timeout=timeout_s, command_timeout=timeout_s, server_settings=_KEEPALIVES
        )
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        try:
            if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _LEADER_LOCK):
                return
            self._set(True)
            while not lost.is_set():
                with contextlib.suppress(TimeoutError):  # nothing has happened
                    async with asyncio.timeout(self._settings.leader_ping.total_seconds()):
                        await lost.wait()
                await connection.fetchval("SELECT 1")
        finally:
            connection.terminate()

    def _set(self, held: bool) -> None:
        if held != self._held:
            self._held = held
            _log.info("leading" if held else "no longer leading")
            self._on_change()

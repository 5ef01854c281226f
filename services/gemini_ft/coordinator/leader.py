"""Leadership: one coordinator holds an advisory lock in Postgres, on a connection of its own, and acts.

Losing the connection is losing the lock; Postgres ends the session of a holder that falls silent. For a moment two
coordinators may both believe that they lead: nothing breaks, because every transition compares generation and phase,
and every order carries its generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import asyncpg

from gemini_ft.coordinator.database import DATABASE_ERRORS, describe
from gemini_ft.coordinator.settings import CoordinatorSettings

__all__ = ["Leadership"]

_log = logging.getLogger("gemini_ft.coordinator.leader")
_LEADER_LOCK = 0x4745_4D46_4C45
# True once this session holds the lock, however often it is asked; null where nothing can be written.
_TAKE = "SELECT CASE WHEN current_setting('transaction_read_only') = 'off' THEN pg_try_advisory_lock($1) END"


class Leadership:
    """Tries to lead for as long as `run` runs; `on_change` is called whenever `held` changes."""

    def __init__(
        self,
        database_url: str,
        settings: CoordinatorSettings,
        may_lead: Callable[[], bool],
        on_change: Callable[[], None],
    ) -> None:
        """`may_lead` tells whether this process could act; while it could not, another one is let lead."""
        self._url = database_url
        self._settings = settings
        self._may_lead = may_lead
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
                if self._may_lead():
                    await self._stand_by_and_lead()
            except DATABASE_ERRORS as error:
                _log.warning("no leadership while Postgres cannot be reached: %s", describe(error))
            finally:
                self._set(False)
            await asyncio.sleep(self._settings.leader_retry.total_seconds())

    async def _stand_by_and_lead(self) -> None:
        lease_s = self._settings.leader_lease.total_seconds()
        connection: Any = await asyncpg.connect(
            self._url,
            timeout=self._settings.database_timeout.total_seconds(),
            command_timeout=lease_s,
            # However its holder vanished (killed, frozen, cut off), the lock is free again after this time.
            server_settings={"idle_session_timeout": str(round(1000 * lease_s))},
        )
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        try:
            while not lost.is_set() and self._may_lead():
                is_taken = await connection.fetchval(_TAKE, _LEADER_LOCK)
                if is_taken is None:
                    _log.warning("no leadership while the database is read-only")
                    return
                self._set(is_taken)
                pause = self._settings.leader_ping if is_taken else self._settings.leader_retry
                with contextlib.suppress(TimeoutError):  # nothing has happened
                    async with asyncio.timeout(pause.total_seconds()):
                        await lost.wait()
        finally:
            connection.terminate()

    def _set(self, held: bool) -> None:
        if held != self._held:
            self._held = held
            _log.info("leading" if held else "no longer leading")
            self._on_change()

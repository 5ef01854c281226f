"""Runs migrations on the connection that the coordinator hands over, or on `-x database_url_file=FILE`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from alembic import context
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.coordinator.tables import Base


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata)
    with context.begin_transaction():
        context.run_migrations()


async def _run_by_url(url: str) -> None:
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://", 1), poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_run)
    finally:
        await engine.dispose()


def _main() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        _run(connection)
        return
    url_file = context.get_x_argument(as_dictionary=True).get("database_url_file")
    if url_file is None:
        raise ConfigurationError("name the database: alembic -x database_url_file=FILE ...")
    asyncio.run(_run_by_url(Path(str(url_file)).read_text().strip()))


_main()

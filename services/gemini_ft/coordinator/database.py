"""The connection pool and the migrations."""

from __future__ import annotations

from pathlib import Path

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, event, text
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoFreeConnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gemini_ft.contracts.errors import AuthenticationError, ConfigurationError
from gemini_ft.coordinator.settings import CoordinatorSettings

__all__ = ["DATABASE_ERRORS", "create_engine", "describe", "migrate", "migrations_folder"]

DATABASE_ERRORS = (
    SQLAlchemyError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the server ended the connection just when it was to be used
    OSError,
    TimeoutError,
)
"""What a database that is away, restarting or read-only may raise. The caller tries again with a new connection."""

_MIGRATIONS_LOCK = 0x4745_4D46_4D49
_READ_ONLY = "25006"


def describe(error: BaseException) -> str:
    """Return what has happened, in one line and without the statement and its values, which may be secret."""
    if isinstance(error, NoFreeConnectionError):
        return "all connections are in use"
    cause = error.driver_exception if isinstance(error, DBAPIError) else error
    return (str(cause).splitlines() or ["no answer in time"])[0]


def create_engine(url: str, settings: CoordinatorSettings, num_connections: int) -> AsyncEngine:
    """Return a pool of `num_connections` that outlives restarts and fail-overs of Postgres. `url` is
    postgresql://user:password@host:port/name.
    """
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigurationError("the database url must begin with postgresql://")
    timeout_s = settings.database_timeout.total_seconds()
    engine = create_async_engine(
        f"postgresql+asyncpg://{url.split('://', 1)[1]}",
        hide_parameters=True,
        pool_size=num_connections,
        max_overflow=0,
        pool_pre_ping=True,
        pool_recycle=600,
        pool_timeout=timeout_s,
        connect_args={"timeout": timeout_s, "command_timeout": timeout_s},
    )
    event.listen(engine.sync_engine, "handle_error", _treat_read_only_as_dead)
    return engine


def _treat_read_only_as_dead(context: ExceptionContext) -> None:
    """A server that was demoted answers pings, but takes no writes: connect anew, perhaps to its successor."""
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
        context.is_disconnect = True


async def migrate(engine: AsyncEngine) -> None:
    """Bring the database to this release's schema; several coordinators may do so at once.

    Raises:
        AuthenticationError: Postgres refuses the user or password.
        ConfigurationError: a newer release has migrated this database.
    """
    try:
        async with engine.begin() as connection:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATIONS_LOCK})
            await connection.run_sync(_upgrade)
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        raise AuthenticationError(f"Postgres refuses the coordinator: {error}; check --database-url-file") from error
    except CommandError as error:
        raise ConfigurationError(
            f"the database has a schema that this release does not know ({error}); run the release that migrated it"
        ) from error


def _upgrade(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def migrations_folder() -> Path:
    """Return where the migrations are: inside the installed package, or at the top of a checkout."""
    installed = Path(__file__).with_name("_migrations")
    return installed if installed.is_dir() else Path(__file__).parents[3] / "migrations"

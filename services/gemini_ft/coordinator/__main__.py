"""`python -m gemini_ft.coordinator`: one coordinator process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from gemini_ft.contracts.errors import ConfigurationError, GeminiError
from gemini_ft.coordinator.server import bind, serve
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.coordinator.settings import CoordinatorSettings

EXIT_REFUSED = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the coordinator until it is told to end; 2 means that it was refused something, in one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m gemini_ft.coordinator", description=__doc__)
    parser.add_argument(
        "--database-url-file", type=Path, required=True, help="holds postgresql://user:password@host/db"
    )
    parser.add_argument("--nats", required=True, metavar="URL", help="nats://host:port")
    parser.add_argument("--nats-token-file", type=Path, help="holds the token for NATS")
    parser.add_argument("--api-token-file", type=Path, required=True, help="holds the bearer token of the API")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="of the API; port 0: any free one")
    parser.add_argument("--ready-file", type=Path, help="gets the API's URL once it is served")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        coordinator = Coordinator(
            _read_secret(given.database_url_file, "--database-url-file"),
            given.nats,
            None if given.nats_token_file is None else _read_secret(given.nats_token_file, "--nats-token-file"),
            CoordinatorSettings(),
        )
        token = _read_secret(given.api_token_file, "--api-token-file")
        listening, url = bind(given.listen)
        asyncio.run(serve(coordinator, token, listening, url, given.ready_file))
    except GeminiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _read_secret(path: Path, option: str) -> str:
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(f"{option}: {path} cannot be read: {error.strerror}") from error
    if not secret:
        raise ConfigurationError(f"{option}: {path} is empty")
    return secret


if __name__ == "__main__":
    sys.exit(main())

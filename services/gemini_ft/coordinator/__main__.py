"""`python -m gemini_ft.coordinator`: one coordinator process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from gemini_ft.contracts.errors import GeminiError
from gemini_ft.contracts.logs import add_log_format, configure_logging
from gemini_ft.coordinator.server import bind, serve
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.coordinator.settings import CoordinatorSettings
from gemini_ft.security.nats_access import NatsAccess, add_nats_options
from gemini_ft.security.secret_files import read_secret
from gemini_ft.security.tls import optional_server_context

EXIT_REFUSED = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the coordinator until it is told to end; 2 means that it was refused something, in one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m gemini_ft.coordinator", description=__doc__)
    parser.add_argument(
        "--database-url-file", type=Path, required=True, help="holds postgresql://user:password@host/db"
    )
    add_nats_options(parser)
    parser.add_argument("--api-token-file", type=Path, required=True, help="holds the bearer token of the API")
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="of the API; port 0: any free one")
    parser.add_argument("--tls-certificate-file", type=Path, metavar="FILE", help="serve the API over https with it")
    parser.add_argument("--tls-key-file", type=Path, metavar="FILE", help="key of that certificate")
    parser.add_argument("--ready-file", type=Path, help="gets the API's URL once it is served")
    parser.add_argument(
        "--agents-need-tokens", action="store_true", help="refuse nodes whose agents present no token of role `agent`"
    )
    add_log_format(parser)
    given = parser.parse_args(arguments)
    configure_logging("coordinator", given.log_format)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        coordinator = Coordinator(
            read_secret(given.database_url_file, "--database-url-file"),
            NatsAccess.of(given),
            CoordinatorSettings(agents_need_tokens=given.agents_need_tokens),
        )
        token = read_secret(given.api_token_file, "--api-token-file")
        tls = optional_server_context(given.tls_certificate_file, given.tls_key_file)
        listening, url = bind(given.listen, encrypted=tls is not None, insecure_plaintext=given.insecure_plaintext)
        asyncio.run(serve(coordinator, token, listening, url, given.ready_file, tls))
    except GeminiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())

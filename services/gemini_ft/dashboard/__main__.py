"""`python -m gemini_ft.dashboard`: the web dashboard of a cluster."""

from __future__ import annotations

import argparse
import logging
import secrets
import sys
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from gemini_ft.client.api_client import AsyncApiClient
from gemini_ft.client.call import base_url
from gemini_ft.contracts.errors import GeminiError
from gemini_ft.contracts.logs import add_log_format, configure_logging
from gemini_ft.security.exposure import bind_http, require_encryption
from gemini_ft.security.secret_files import read_or_create_secret, read_secret
from gemini_ft.security.tls import client_context, optional_server_context

EXIT_REFUSED = 2


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal ends it; 2 means that something was refused, in one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m gemini_ft.dashboard", description=__doc__)
    parser.add_argument("--api", required=True, metavar="URL", help="of a coordinator")
    parser.add_argument("--api-ca-file", type=Path, metavar="FILE", help="trust this authority alone for the API")
    parser.add_argument("--listen", default="127.0.0.1:8081", metavar="HOST:PORT", help="port 0: any free one")
    parser.add_argument("--tls-certificate-file", type=Path, metavar="FILE", help="serve over https with it")
    parser.add_argument("--tls-key-file", type=Path, metavar="FILE", help="key of that certificate")
    parser.add_argument(
        "--insecure-plaintext", action="store_true", help="let tokens cross the network unencrypted if it has to be"
    )
    parser.add_argument(
        "--cookie-secret-file",
        type=Path,
        metavar="FILE",
        help="signs the cookies, made if it is missing; default: a new secret at each start",
    )
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="gets the URL once it is served")
    add_log_format(parser)
    given = parser.parse_args(arguments)
    configure_logging("dashboard", given.log_format)
    for chatty in ("httpx", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    from gemini_ft.dashboard.dashboard import Dashboard
    from gemini_ft.dashboard.server import create_app, serve

    try:
        api = base_url(given.api)
        require_encryption(
            f"the API at {api}",
            urlsplit(api).hostname or "",
            encrypted=api.startswith("https:"),
            insecure_plaintext=given.insecure_plaintext,
            remedy="serve it over https",
        )
        ca = client_context(given.api_ca_file, "--api-ca-file")
        tls = optional_server_context(given.tls_certificate_file, given.tls_key_file)
        secret = secrets.token_urlsafe(32)
        if given.cookie_secret_file is not None:
            read_or_create_secret(given.cookie_secret_file)
            secret = read_secret(given.cookie_secret_file, "--cookie-secret-file")
        listening, url = bind_http(
            "the dashboard", given.listen, encrypted=tls is not None, insecure_plaintext=given.insecure_plaintext
        )
    except GeminiError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED

    def connect(token: str) -> AsyncApiClient:
        # Whoever looks is told at once that the API does not answer; the next reading tries again.
        transport = httpx.AsyncHTTPTransport(verify=ca)
        return AsyncApiClient(api, token, patience=timedelta(0), transport=transport)

    serve(create_app(Dashboard(connect), secret, encrypted=tls is not None), listening, url, given.ready_file, tls)
    return 0


if __name__ == "__main__":
    sys.exit(main())

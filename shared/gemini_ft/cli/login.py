"""`gemini-ft login`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gemini_ft.cli.config import Access, load_contexts, save_contexts
from gemini_ft.cli.output import tell
from gemini_ft.contracts.errors import ConfigurationError
from gemini_ft.security.secret_files import read_secret

__all__ = ["login"]


def login(
    url: Annotated[str, typer.Argument(help="URL of the coordinator.")],
    name: Annotated[str, typer.Option(help="What to call this cluster.")] = "default",
    token_file: Annotated[
        Path | None, typer.Option(help="File with the API token; default: asks for it, or reads it from stdin.")
    ] = None,
) -> None:
    """Keep how a cluster is reached, and use it from now on.

    \b
    Examples:
      gemini-ft login https://gemini.example.org --name prod
      gemini-ft login http://127.0.0.1:8080 --token-file api-token
    """
    from gemini_ft.client.api_client import ApiClient

    if not name.strip():
        raise ConfigurationError("--name is empty; give the cluster a name")
    if token_file is not None:
        token = read_secret(token_file, "--token-file")
    elif sys.stdin.isatty():
        token = typer.prompt("API token", hide_input=True, err=True)
    else:
        token = sys.stdin.readline()
    contexts = load_contexts()
    with ApiClient(url, token) as client:
        cluster = client.cluster()
        contexts.contexts[name] = Access(url=client.url, token=token.strip())
    contexts.current = name
    save_contexts(contexts)
    tell(f"{name} is in use: {cluster.num_nodes} nodes at {client.url}")

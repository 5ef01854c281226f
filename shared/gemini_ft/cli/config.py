"""Which coordinator a command talks to, and the file of the contexts that people have logged in to.

The option `--context` goes before GEMINI_FT_API with GEMINI_FT_API_TOKEN_FILE, and these before GEMINI_FT_CONTEXT and
the context that was chosen last.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemini_ft.contracts.errors import ConfigurationError, NotFoundError
from gemini_ft.security.secret_files import read_secret, write_secret

if TYPE_CHECKING:
    from gemini_ft.client.api_client import ApiClient

__all__ = [
    "Access",
    "ContextName",
    "Contexts",
    "access_to",
    "connect",
    "context_in_force",
    "contexts_path",
    "load_contexts",
    "logged_in",
    "save_contexts",
]

API_VARIABLE = "GEMINI_FT_API"
TOKEN_VARIABLE = "GEMINI_FT_API_TOKEN_FILE"
CONTEXT_VARIABLE = "GEMINI_FT_CONTEXT"

_WATCH_PATIENCE = timedelta(seconds=60)

ContextName = Annotated[
    str,
    typer.Option("--context", help="Cluster to talk to, as `gemini-ft contexts list` names it.", show_default=False),
]


class Access(BaseModel):
    """How a coordinator is reached."""

    model_config = ConfigDict(extra="forbid")

    url: str
    token: str = Field(repr=False)


class Contexts(BaseModel):
    """What the file holds; `current` is empty or one of the names."""

    model_config = ConfigDict(extra="forbid")

    current: str = ""
    contexts: dict[str, Access] = {}

    def find(self, name: str) -> Access:
        """Return a context; raises NotFoundError with the names that there are."""
        try:
            return self.contexts[name]
        except KeyError:
            known = ", ".join(sorted(self.contexts)) or "none"
            raise NotFoundError(f"there is no context {name!r}; known: {known}; `gemini-ft login` makes one") from None


def contexts_path() -> Path:
    """Return where the file is, whether or not it is there yet."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "gemini-ft" / "contexts.json"


def load_contexts() -> Contexts:
    """Read the file; no file is no contexts.

    Raises:
        ConfigurationError: others can read it, or it is damaged.
    """
    path = contexts_path()
    if not path.exists():
        return Contexts()
    try:
        return Contexts.model_validate_json(read_secret(path, "the file of contexts"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigurationError(
            f"the file of contexts {path} is damaged: {where}: {first['msg']}; remove it and log in again"
        ) from None


def save_contexts(contexts: Contexts) -> None:
    """Write the file, readable by its owner only."""
    path = contexts_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_secret(path, contexts.model_dump_json(indent=2) + "\n")


@contextmanager
def logged_in(name: str, access: Access) -> Iterator[None]:
    """Have a context of this name, in use, while this context manager is open; afterwards the one before is again."""
    contexts = load_contexts()
    before = contexts.current if contexts.current != name else ""
    contexts.contexts[name] = access
    contexts.current = name
    save_contexts(contexts)
    try:
        yield
    finally:
        contexts = load_contexts()
        if contexts.contexts.get(name) == access:
            del contexts.contexts[name]
        if contexts.current not in contexts.contexts:
            contexts.current = before if before in contexts.contexts else ""
        save_contexts(contexts)


def context_in_force(context: str = "") -> str:
    """Return the name of the context that counts where no API is named; empty: there is none."""
    return context or os.environ.get(CONTEXT_VARIABLE, "") or load_contexts().current


def access_to(context: str = "") -> Access:
    """Return how to reach the coordinator of a context, or of the one that is in force.

    Raises:
        ConfigurationError: there is none, or its token cannot be read.
        NotFoundError: there is no context of this name.
    """
    url = os.environ.get(API_VARIABLE, "")
    if url and not context:
        file = os.environ.get(TOKEN_VARIABLE, "")
        if not file:
            raise ConfigurationError(f"{API_VARIABLE} is set, but {TOKEN_VARIABLE} is not; set it to the token's file")
        return Access(url=url, token=read_secret(Path(file), TOKEN_VARIABLE))
    name = context_in_force(context)
    if not name:
        raise ConfigurationError(
            f"no coordinator is known: run `gemini-ft login URL`, or set {API_VARIABLE} and {TOKEN_VARIABLE}"
        )
    return load_contexts().find(name)


def connect(context: str = "", *, watch: bool = False) -> ApiClient:
    """Return a client of the coordinator that `access_to` names; its caller closes it.

    With `watch` it is patient: who watches wants to see a coordinator come back.
    """
    from gemini_ft.client.api_client import PATIENCE, ApiClient

    access = access_to(context)
    return ApiClient(access.url, access.token, patience=_WATCH_PATIENCE if watch else PATIENCE)

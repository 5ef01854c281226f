"""Tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from gemini_ft.cli.render.cells import moment, printable, table
from gemini_ft.contracts.api import TokenModel

__all__ = ["tokens_table"]


def tokens_table(tokens: Sequence[TokenModel]) -> Table:
    """One line a token."""
    shown = table("token", "name", "role", "jobs", "created", "expires", "used", "revoked")
    for token in tokens:
        shown.add_row(
            token.token_id,
            printable(token.name),
            token.role,
            "all" if token.job_ids is None else " ".join(token.job_ids),
            moment(token.created_at),
            moment(token.expires_at),
            moment(token.last_used_at),
            moment(token.revoked_at),
        )
    return shown

"""Pages of lists: a bounded number of items, and an opaque cursor that names the last of them.

A cursor holds a key of the list's order, not a position: whatever is added or removed meanwhile, the next page begins
right after the last item of this one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, TypeVar

from fastapi import Query
from pydantic import AwareDatetime, Field, StringConstraints, TypeAdapter

from gemini_ft.contracts.api import Page
from gemini_ft.coordinator.api.problems import InvalidRequestError

__all__ = ["BY_NUMBER", "BY_TIME_AND_ID", "BY_TWO_NUMBERS", "Cursor", "Limit", "Page", "after", "page_of"]

Limit = Annotated[int, Query(ge=1, le=1000, description="at most so many items")]
Cursor = Annotated[str | None, Query(max_length=500, description="`next_cursor` of the page before")]

_Number = Annotated[int, Field(ge=0, lt=2**63)]
BY_NUMBER = TypeAdapter(_Number)
BY_TWO_NUMBERS = TypeAdapter(tuple[_Number, _Number])
BY_TIME_AND_ID = TypeAdapter(tuple[AwareDatetime, Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,63}$")]])

Item = TypeVar("Item")
Key = TypeVar("Key")
Row = TypeVar("Row")


def after(cursor: str | None, kind: TypeAdapter[Key]) -> Key | None:
    """Return the key that a cursor of `page_of` holds; None: there is no cursor.

    Raises:
        InvalidRequestError: it is no cursor of such a list.
    """
    if cursor is None:
        return None
    try:
        return kind.validate_json(base64.urlsafe_b64decode(cursor))
    except ValueError:
        raise InvalidRequestError(
            f"cursor {cursor[:40]!r} is not of this list; pass on `next_cursor` as it was given", field="cursor"
        ) from None


def page_of(
    rows: Sequence[Row], limit: int, key: Callable[[Row], object], item: Callable[[Row], Item | None]
) -> Page[Item]:
    """Make a page of `rows`, of which one more than `limit` was asked for; what has no item is left out."""
    shown = rows[:limit]
    cursor = None
    if len(rows) > limit:
        text = json.dumps(key(shown[-1]), default=datetime.isoformat)
        cursor = base64.urlsafe_b64encode(text.encode()).decode()
    items = [found for row in shown if (found := item(row)) is not None]
    return Page(items=items, next_cursor=cursor)

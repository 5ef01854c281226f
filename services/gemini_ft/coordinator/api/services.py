"""What the routes work with, as one object of the application."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from gemini_ft.coordinator.api.streams import Streams
from gemini_ft.coordinator.rank_logs import RankLogs
from gemini_ft.coordinator.service import Coordinator
from gemini_ft.coordinator.tokens import Tokens

__all__ = ["Api", "Services"]


@dataclass(frozen=True, slots=True)
class Services:
    """One for each application."""

    coordinator: Coordinator
    tokens: Tokens
    streams: Streams
    logs: RankLogs


def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


Api = Annotated[Services, Depends(_services)]

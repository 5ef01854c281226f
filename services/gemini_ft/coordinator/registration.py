"""Gives agents their identity (docs/protocol.md, section 6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import ValidationError

from gemini_ft.contracts.errors import AuthenticationError, ConflictError, GeminiError, ProtocolError
from gemini_ft.contracts.messages import Register, Registered, RegistrationRefused
from gemini_ft.contracts.subjects import REGISTER
from gemini_ft.coordinator.database import DATABASE_ERRORS, describe
from gemini_ft.coordinator.observations import Observations
from gemini_ft.coordinator.settings import CoordinatorSettings
from gemini_ft.coordinator.state import NodeStatus, NodeView
from gemini_ft.coordinator.store import Store
from gemini_ft.coordinator.tokens import Role, Tokens

__all__ = ["Registration"]

_log = logging.getLogger("gemini_ft.coordinator.registration")
_POLL_S = 0.05


class Registration:
    """Answers requests to register. Any coordinator may do so, whoever leads."""

    def __init__(
        self,
        client: Client,
        store: Store,
        seen: Observations,
        clock: Callable[[], float],
        settings: CoordinatorSettings,
        tokens: Tokens,
        on_registered: Callable[[], None],
    ) -> None:
        self._client = client
        self._store = store
        self._seen = seen
        self._clock = clock
        self._tokens = tokens
        self._needs_token = settings.agents_need_tokens
        self._silence_s = settings.silence.total_seconds()
        self._on_registered = on_registered
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen for requests; one of all coordinators gets each."""
        await self._client.subscribe(REGISTER, queue="coordinators", cb=self._on_message)

    async def _on_message(self, message: Msg) -> None:
        task = asyncio.create_task(self._answer(message))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, message: Msg) -> None:
        answer: Registered | RegistrationRefused
        try:
            answer = Registered(node_id=await self._register(_parse(message.data)))
        except GeminiError as error:
            _log.warning("registration refused: %s", error)
            answer = RegistrationRefused(error=error.to_wire())
        except DATABASE_ERRORS as error:
            _log.warning("no answer to a registration, the agent will ask again: %s", describe(error))
            return
        await message.respond(answer.model_dump_json().encode())
        self._on_registered()

    async def _register(self, request: Register) -> str:
        await self._check_token(request)
        known, may_replace = None, []
        if request.node_id is not None:
            known = await self._store.find_node(request.node_id)
        if known is not None and self._may_be_taken_over(known, request) and await self._is_over(known):
            may_replace.append(known.incarnation)
        node = await self._store.register(request, may_replace=may_replace)
        if node is None:
            assert known is not None
            raise ConflictError(
                f"node id {known.node_id} is in use by {_who(known)}, which is alive, "
                f"and {_who(request)} presents it too; if the state folder was copied, remove node.json from the copy",
                node_id=known.node_id,
            )
        return node.node_id

    async def _check_token(self, request: Register) -> None:
        if not request.token:
            if self._needs_token:
                raise AuthenticationError(f"{_who(request)} presents no token; give its agent one of role `agent`")
            return
        principal = await self._tokens.authenticate(request.token)
        if principal.role is not Role.AGENT:
            raise AuthenticationError(
                f"{_who(request)} presents token {principal.name!r}, a {principal.role}'s; "
                "give its agent one of role `agent`"
            )

    def _may_be_taken_over(self, known: NodeView, request: Register) -> bool:
        moved = known.address != request.address and known.incarnation != request.incarnation
        return moved and known.status is not NodeStatus.FAILED

    async def _is_over(self, known: NodeView) -> bool:
        """Wait until the former life shows a sign, or has been silent for long enough by our clock."""
        asked_at = self._clock()
        while not self._seen.is_silent(known, self._silence_s):
            sighting = self._seen.sighting(known)
            if sighting is not None and sighting.received_at > asked_at:
                return False
            await asyncio.sleep(_POLL_S)
        return True


def _who(party: NodeView | Register) -> str:
    return f"{party.hostname} at {party.address.host}:{party.address.port}"


def _parse(data: bytes) -> Register:
    try:
        return Register.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"a request to register is malformed: {where}: {first['msg']}") from None

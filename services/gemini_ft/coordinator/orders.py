"""Sends orders to agents and takes their answers.

An order is wanted until its effect is seen: whoever wants it submits it at every pass, and it goes out at most once a
`repeat`. All orders may be repeated. An answer counts whenever it comes, also long after a repetition, because every
order has one reply subject for all its repetitions.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from nats.aio.client import Client
from nats.aio.msg import Msg
from pydantic import ValidationError

from gemini_ft.contracts.ids import Incarnation, NodeId
from gemini_ft.contracts.messages import Order, OrderReply, order_replies
from gemini_ft.contracts.subjects import order_subject
from gemini_ft.coordinator.actions import Send
from gemini_ft.coordinator.observations import fingerprint

__all__ = ["Orders"]

_log = logging.getLogger("gemini_ft.coordinator.orders")
_NO_RESPONDERS = "503"
_KEPT_REPEATS = 60


@dataclass(slots=True)
class _Submitted:
    node_id: NodeId
    order: Order
    subject: str
    sent_at: float


class Orders:
    """Orders under way, by node, its life, and content."""

    def __init__(
        self,
        client: Client,
        clock: Callable[[], float],
        repeat: timedelta,
        on_reply: Callable[[NodeId, Order, OrderReply], None],
    ) -> None:
        self._client = client
        self._clock = clock
        self._repeat_s = repeat.total_seconds()
        self._on_reply = on_reply
        self._inbox = client.new_inbox()
        self._submitted: dict[tuple[NodeId, Incarnation, str], _Submitted] = {}
        self._by_subject: dict[str, _Submitted] = {}

    async def start(self) -> None:
        """Listen for answers."""
        await self._client.subscribe(f"{self._inbox}.*", cb=self._on_message)

    async def submit(self, send: Send) -> bool:
        """Send the order unless that was done just now. Returns True if it went out."""
        now = self._clock()
        key = (send.node_id, send.incarnation, fingerprint(send.order))
        known = self._submitted.get(key)
        if known is None:
            known = _Submitted(send.node_id, send.order, f"{self._inbox}.{secrets.token_hex(8)}", now)
            self._submitted[key] = self._by_subject[known.subject] = known
        elif now - known.sent_at < self._repeat_s:
            return False
        known.sent_at = now
        self._forget_old(now)
        payload = send.order.model_dump_json().encode()
        await self._client.publish(order_subject(send.node_id), payload, reply=known.subject)
        return True

    def repeat_all(self) -> None:
        """Let every order go out again at once, because the broker may have lost it."""
        for submitted in self._submitted.values():
            submitted.sent_at -= self._repeat_s

    async def _on_message(self, message: Msg) -> None:
        submitted = self._by_subject.get(message.subject)
        if submitted is None:
            return
        if message.headers is not None and message.headers.get("Status") == _NO_RESPONDERS:
            return  # nobody listens there now; it is repeated for as long as it is wanted
        try:
            reply = order_replies.validate_json(message.data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            _log.warning("ignored an answer of %s to %s: %s", submitted.node_id, submitted.order.kind, first["msg"])
            return
        self._on_reply(submitted.node_id, submitted.order, reply)

    def _forget_old(self, now: float) -> None:
        old = [key for key, known in self._submitted.items() if now - known.sent_at > _KEPT_REPEATS * self._repeat_s]
        for key in old:
            del self._by_subject[self._submitted.pop(key).subject]

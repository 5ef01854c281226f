"""An agent on a NATS server that encrypts and knows roles."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
import pytest
from agent_harness import NODE, SOON_S, eventually, start_job
from certificates import CertificateAuthority
from nats.aio.msg import Msg

from gemini_ft.contracts.messages import Heartbeat, OrderDone, order_replies
from gemini_ft.contracts.permissions import NatsRole
from gemini_ft.contracts.subjects import HEARTBEATS, order_subject
from gemini_ft.localstack.nats import NatsServer
from gemini_ft.security.nats_access import NatsAccess
from gemini_ft.security.nats_config import credentials_file, role_authorization, tls_block


async def test_it_beats_and_obeys_and_believes_no_other_server(
    run_agent, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, credentials = CertificateAuthority(tmp_path / "ca"), tmp_path / "credentials"
    shown = authority.issue("nats")
    extra = {
        "authorization": role_authorization(credentials),
        "tls": tls_block(shown.certificate_file, shown.key_file),
    }
    beats: list[Heartbeat] = []

    async def hear(message: Msg) -> None:
        beats.append(Heartbeat.model_validate_json(message.data))

    with NatsServer(tmp_path / "nats", extra=extra) as server:
        access = NatsAccess(
            url=server.url,
            credentials_file=credentials_file(credentials, NatsRole.COORDINATOR),
            ca_file=authority.ca_file,
        )
        coordinator = await nats.connect(server.url, **access.options(NatsRole.COORDINATOR))
        await coordinator.subscribe(HEARTBEATS, cb=hear)
        await coordinator.flush()
        own = credentials_file(credentials, NatsRole.AGENT)
        async with run_agent(server.url, nats_credentials_file=own, nats_ca_file=authority.ca_file):
            await eventually("a heartbeat", lambda: beats)
            order = start_job().model_dump_json().encode()
            reply = await coordinator.request(order_subject(NODE), order, timeout=SOON_S)
            assert isinstance(order_replies.validate_json(reply.data), OrderDone)
        other = CertificateAuthority(tmp_path / "other", "other-ca")
        async with run_agent(server.url, nats_credentials_file=own, nats_ca_file=other.ca_file):
            await eventually("the complaint", lambda: "certificate verify failed" in caplog.text)
        async with asyncio.timeout(SOON_S):
            await coordinator.close()

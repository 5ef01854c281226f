"""The agent's command line: `python -m gemini_ft.agent --nats URL --state-dir DIR --memory-dir DIR ...`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemini_ft.agent.agent import Agent
from gemini_ft.agent.persistence import StateFolder
from gemini_ft.agent.replicas.service import LocalReplicaService
from gemini_ft.agent.replicas.settings import ReplicaSettings
from gemini_ft.agent.settings import AgentSettings, parse_labels, parse_seconds
from gemini_ft.contracts.errors import ConfigurationError, ConflictError, GeminiError
from gemini_ft.contracts.logs import LOG_FORMAT_VARIABLE, add_log_format, configure_logging
from gemini_ft.contracts.permissions import NatsRole

__all__ = ["main"]

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_CONFLICT = 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gemini_ft.agent",
        description="Run the agent of one node: it keeps checkpoints in memory and starts the node's launcher.",
        epilog="Each option is also read from GEMINI_FT_AGENT_<NAME>; the command line wins.",
    )
    parser.add_argument("--nats", dest="nats_url", metavar="URL", help="where the control plane's NATS listens")
    parser.add_argument("--nats-credentials-file", type=Path, metavar="FILE", help="holds USER:PASSWORD for NATS")
    parser.add_argument("--nats-token-file", type=Path, metavar="FILE", help="holds the token, where NATS has no users")
    parser.add_argument("--nats-ca-file", type=Path, metavar="FILE", help="who signed NATS's certificate, with tls://")
    parser.add_argument(
        "--registration-token-file", type=Path, metavar="FILE", help="holds an API token of role `agent`"
    )
    parser.add_argument(
        "--insecure-plaintext",
        action="store_true",
        default=None,
        help="let secrets go to NATS over a trusted network without TLS",
    )
    parser.add_argument(
        "--tls-certificate-file", type=Path, metavar="FILE", help="encrypt what goes between agents; this node's own"
    )
    parser.add_argument("--tls-key-file", type=Path, metavar="FILE", help="key of that certificate")
    parser.add_argument("--tls-ca-file", type=Path, metavar="FILE", help="who signed the certificates of all agents")
    parser.add_argument(
        "--state-dir", type=Path, metavar="DIR", help="identity and job of this node; one agent a folder"
    )
    parser.add_argument(
        "--memory-dir", type=Path, metavar="DIR", help="folder on tmpfs for checkpoints; one agent a folder"
    )
    parser.add_argument(
        "--memory-limit-bytes", type=int, metavar="N", help="most memory for checkpoints (default: all)"
    )
    parser.add_argument(
        "--host", metavar="ADDRESS", help="address at which other nodes reach this one (default 127.0.0.1)"
    )
    parser.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="output of launcher and ranks (default: in --state-dir)"
    )
    parser.add_argument(
        "--socket", dest="socket_path", type=Path, metavar="PATH", help="socket for ranks and launchers"
    )
    parser.add_argument(
        "--label", action="append", default=[], metavar="KEY=VALUE", help="for instance rack=a3; repeatable"
    )
    parser.add_argument(
        "--metrics-listen", metavar="HOST:PORT", help="serve metrics for Prometheus there (default: nowhere)"
    )
    add_log_format(parser)
    parser.add_argument("--heartbeat-interval", metavar="SECONDS", help="period of heartbeats (default 1)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent until SIGTERM or SIGINT and return its exit code.

    0: asked to end; 1: it cannot serve; 2: wrong usage; 3: its identity or its state folder belongs to another agent.
    The ranks and the launcher of the node go on in any case.
    """
    options: dict[str, Any] = vars(_parser().parse_args(argv))
    # The launcher takes it from there.
    log_format = os.environ[LOG_FORMAT_VARIABLE] = options.pop("log_format")
    try:
        options["labels"] = parse_labels(options.pop("label")) or None
        if options["heartbeat_interval"] is not None:
            options["heartbeat_interval"] = parse_seconds(options["heartbeat_interval"], "--heartbeat-interval")
        settings = AgentSettings.load(os.environ, options)
        # Read for each connection, but refused here if it cannot be right.
        settings.nats_access.options(NatsRole.AGENT)
        settings.registration_token()
        with StateFolder(settings.state_dir) as state:
            asyncio.run(_serve(settings, state, log_format))
    except ConfigurationError as error:
        return _refuse(error, _EXIT_USAGE)
    except ConflictError as error:
        return _refuse(error, _EXIT_CONFLICT)
    except GeminiError as error:
        return _refuse(error, _EXIT_FAILED)
    return 0


async def _serve(settings: AgentSettings, state: StateFolder, log_format: str) -> None:
    stop = asyncio.Event()
    # For politeness only: nothing is lost when the agent is killed instead.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    memory = ReplicaSettings(settings.memory_dir, settings.host, settings.memory_limit_bytes, tls=settings.peer_tls())
    agent = Agent(settings, state, LocalReplicaService(memory))
    configure_logging("agent", log_format, agent.log_facts)
    await agent.run(stop)


def _refuse(error: GeminiError, code: int) -> int:
    print(f"agent: {error}", file=sys.stderr)
    return code

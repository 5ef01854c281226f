"""Reads the facts that `doctor.py` judges."""

import ctypes
import importlib.metadata
import os
import resource
import socket
import sys
import time
from pathlib import Path

from packaging.requirements import Requirement

from gemini_ft.agent.capacity import read_capacity_facts
from gemini_ft.agent.doctor import ClockFacts, MachineFacts, NameFacts

_DISTRIBUTION = "gemini-ft"
_CLOCK_INTERVAL_S = 0.1
_CONNECT_TIMEOUT_S = 5.0
_TIME_ERROR = 5
_TIMEX_BYTES = 512


def read_machine_facts(directory: Path) -> MachineFacts:
    """`directory` is where the replica store will be. Takes about a tenth of a second."""
    requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    return MachineFacts(
        capacity=read_capacity_facts(directory),
        memlock_bytes=_memlock_bytes(),
        has_gpu=Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists(),
        port_error=_port_error(),
        names=NameFacts(
            hostname=socket.gethostname(),
            hostname_addresses=_addresses(socket.gethostname()),
            localhost_addresses=_addresses("localhost"),
        ),
        clock=_clock_facts(),
        pidfd_error=_pidfd_error(),
        python=sys.version_info[:3],
        requirements=requirements,
        versions=_versions(requirements),
    )


def _memlock_bytes() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _port_error() -> str | None:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return str(error)
    return None


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return sorted({str(address[0]) for *_, address in found})


def _clock_facts() -> ClockFacts:
    monotonic, realtime = time.monotonic(), time.time()
    time.sleep(_CLOCK_INTERVAL_S)
    return ClockFacts(
        monotonic_s=time.monotonic() - monotonic,
        realtime_s=time.time() - realtime,
        synchronized=_synchronized(),
    )


def _synchronized() -> bool | None:
    """The kernel's own word on NTP; a zeroed `struct timex` asks without changing anything."""
    try:
        state: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except AttributeError:
        return None
    return None if state < 0 else state != _TIME_ERROR


def _pidfd_error() -> str | None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return str(error)
    return None


def _versions(requirements: list[str]) -> dict[str, str]:
    found = {}
    for name in {Requirement(text).name for text in requirements}:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

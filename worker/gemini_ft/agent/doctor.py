"""Is this machine fit for an agent and its ranks? Each check is a function of facts; `_machine.py` reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address

from packaging.requirements import Requirement

from gemini_ft.agent.capacity import CapacityFacts, check_capacity

_MIN_PYTHON = (3, 11)
_MAX_CLOCK_STEP_S = 0.05
_NEEDED_EXTRA = "worker"
_EXTRAS = (_NEEDED_EXTRA, "deepspeed", "local")


class Status(StrEnum):
    """OK, INFO (nothing to do), WARN (some set-ups will suffer), FAIL (change this before training)."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check; `message` says what to change unless the status is OK or INFO."""

    check: str
    status: Status
    message: str


@dataclass(frozen=True)
class NameFacts:
    """What names resolve to; an empty list means that resolving failed."""

    hostname: str
    hostname_addresses: Sequence[str]
    localhost_addresses: Sequence[str]


@dataclass(frozen=True)
class ClockFacts:
    """How far both clocks went over one short interval, and whether the kernel calls its time synchronized."""

    monotonic_s: float
    realtime_s: float
    synchronized: bool | None


@dataclass(frozen=True)
class MachineFacts:
    capacity: CapacityFacts
    memlock_bytes: int | None
    """Soft limit of locked memory; None when unlimited."""
    has_gpu: bool
    port_error: str | None
    """Why a loopback port could not be bound and reached, if it could not."""
    names: NameFacts
    clock: ClockFacts
    pidfd_error: str | None
    python: tuple[int, int, int]
    requirements: Sequence[str]
    """What the installed distribution requires, as in its metadata."""
    versions: Mapping[str, str]
    """Installed version of each required distribution that is there."""


def diagnose(facts: MachineFacts, need_bytes: int | None) -> list[Finding]:
    """Run every check. `need_bytes` is the replica memory that the job will need here, if it is known."""
    return [
        check_memory(facts.capacity, need_bytes),
        check_memlock(facts.memlock_bytes, facts.has_gpu, need_bytes),
        check_ports(facts.port_error),
        check_localhost(facts.names),
        check_hostname(facts.names),
        check_clock(facts.clock),
        check_pidfd(facts.pidfd_error),
        check_python(facts.python),
        *check_versions(facts.requirements, facts.versions),
    ]


def check_memory(facts: CapacityFacts, need_bytes: int | None) -> Finding:
    if need_bytes is None:
        # What is asked for is then nothing, and the report tells what there is.
        message = check_capacity(0, facts).message.partition(", and ")[2]
        return Finding("memory", Status.INFO, f"{message}; give --shard-bytes to compare it with what a job needs")
    report = check_capacity(need_bytes, facts)
    if not report.fits:
        return Finding("memory", Status.FAIL, report.message)
    if not facts.in_memory:
        message = (
            f"{facts.directory} is on {facts.file_system}, which is slow; choose a directory on tmpfs, such as /dev/shm"
        )
        return Finding("memory", Status.WARN, message)
    return Finding("memory", Status.OK, report.message)


def check_memlock(limit_bytes: int | None, has_gpu: bool, need_bytes: int | None) -> Finding:
    """Buffers are pinned for copies from a GPU; without one nothing is locked."""
    limit = "unlimited" if limit_bytes is None else f"{limit_bytes} bytes"
    if has_gpu and limit_bytes is not None and limit_bytes < (need_bytes or 1 << 30):
        return Finding(
            "memlock",
            Status.FAIL,
            f"the limit of locked memory is {limit}, too little to pin the buffers for the GPU; "
            "raise it: `ulimit -l unlimited`, `LimitMEMLOCK=infinity` with systemd, `--ulimit memlock=-1` with docker",
        )
    return Finding("memlock", Status.OK, f"the limit of locked memory is {limit}")


def check_ports(error: str | None) -> Finding:
    if error is None:
        return Finding("ports", Status.OK, "a free port on 127.0.0.1 can be bound and reached")
    return Finding(
        "ports",
        Status.FAIL,
        f"a free port on 127.0.0.1 cannot be bound and reached ({error}); bring the interface `lo` up and "
        "let the firewall pass loopback",
    )


def check_localhost(names: NameFacts) -> Finding:
    if "127.0.0.1" in names.localhost_addresses:
        return Finding("localhost", Status.OK, "`localhost` is 127.0.0.1")
    found = ", ".join(names.localhost_addresses) or "nothing"
    return Finding(
        "localhost",
        Status.FAIL,
        f"`localhost` resolves to {found}; put `127.0.0.1 localhost` into /etc/hosts",
    )


def check_hostname(names: NameFacts) -> Finding:
    """Gloo and NCCL bootstrap on the address that the host's name resolves to."""
    hint = (
        "put the address of the training network and this name into /etc/hosts, or set "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to its interface"
    )
    if not names.hostname_addresses:
        message = f"the host's name `{names.hostname}` does not resolve; {hint}"
        return Finding("hostname", Status.WARN, message)
    found = ", ".join(names.hostname_addresses)
    if all(ip_address(address.partition("%")[0]).is_loopback for address in names.hostname_addresses):
        message = (
            f"the host's name `{names.hostname}` resolves to {found}, where no other machine can reach it; "
            f"for more than one machine {hint}"
        )
        return Finding("hostname", Status.WARN, message)
    return Finding("hostname", Status.OK, f"the host's name `{names.hostname}` resolves to {found}")


def check_clock(clock: ClockFacts) -> Finding:
    """Decisions use monotonic clocks only, so that a wrong clock makes logs and tokens wrong, nothing else."""
    if clock.monotonic_s <= 0:
        return Finding("clock", Status.FAIL, "the monotonic clock does not advance; use another kernel or hypervisor")
    drift_s = abs(clock.realtime_s - clock.monotonic_s)
    if drift_s > _MAX_CLOCK_STEP_S:
        message = f"the wall clock was moved by {drift_s:.3f} s while it was watched; let NTP slew it, not step it"
        return Finding("clock", Status.WARN, message)
    if clock.synchronized is False:
        message = (
            "the kernel does not call its time synchronized; run chrony or systemd-timesyncd "
            "to have logs of several machines agree"
        )
        return Finding("clock", Status.INFO, message)
    return Finding("clock", Status.OK, "wall clock and monotonic clock run alike")


def check_pidfd(error: str | None) -> Finding:
    if error is None:
        return Finding("pidfd", Status.OK, "the end of a process can be seen at once")
    return Finding(
        "pidfd",
        Status.FAIL,
        f"pidfd_open is refused ({error}), by which an agent sees a dead rank at once; use Linux 5.3 or "
        "newer and a seccomp profile that allows it",
    )


def check_python(version: tuple[int, int, int]) -> Finding:
    found = ".".join(map(str, version))
    if version[:2] < _MIN_PYTHON:
        return Finding("python", Status.FAIL, f"this is Python {found}; install Python 3.11 or newer")
    return Finding("python", Status.OK, f"Python {found}")


def check_versions(requirements: Sequence[str], versions: Mapping[str, str]) -> list[Finding]:
    """Hold what is installed against what the extras ask for; only a gap in `worker` is a failure."""
    findings: dict[str, Finding] = {}
    for requirement in map(Requirement, requirements):
        extra = next(
            (name for name in _EXTRAS if requirement.marker and requirement.marker.evaluate({"extra": name})),
            None,
        )
        if extra is None or requirement.name == "gemini-ft":
            continue
        findings.setdefault(requirement.name, _check_version(requirement, extra, versions))
    return list(findings.values())


def _check_version(requirement: Requirement, extra: str, versions: Mapping[str, str]) -> Finding:
    name = requirement.name
    install = f"pip install 'gemini-ft[{extra}]'"
    found = versions.get(name)
    if found is None:
        status = Status.FAIL if extra == _NEEDED_EXTRA else Status.INFO
        return Finding(name, status, f"{name} is not installed; {install}")
    if not requirement.specifier.contains(found, prereleases=True):
        message = f"{name} {found} is installed, and {requirement.specifier} is needed; {install}"
        return Finding(name, Status.FAIL, message)
    return Finding(name, Status.OK, f"{name} {found}")

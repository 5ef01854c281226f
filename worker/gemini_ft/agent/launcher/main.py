"""The launcher's command line: `python -m gemini_ft.agent.launcher [options] -- script.py args...`."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from gemini_ft.agent.launcher.cold_start import ColdStarter
from gemini_ft.agent.launcher.entry import RankOrder
from gemini_ft.agent.launcher.learning import learned_path, reported_path
from gemini_ft.agent.launcher.rank_process import RankStarter
from gemini_ft.agent.launcher.warm_server import WarmStarter
from gemini_ft.contracts.errors import ConfigurationError, GeminiError
from gemini_ft.contracts.logs import add_log_format, configure_logging

__all__ = ["main"]

_EXIT_FAILED = 1
_EXIT_USAGE = 2
_EXIT_UNAVAILABLE = 69

logger = logging.getLogger(__name__)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gemini_ft.agent.launcher",
        description="Start this node's ranks of a job, and start them again whenever the coordinator orders it.",
        usage="%(prog)s [options] -- script.py [args...]   or   %(prog)s [options] -m -- module [args...]",
    )
    parser.add_argument("--agent-socket", required=True, help="Unix socket of the node's agent")
    parser.add_argument("--job", required=True, help="id of the job")
    parser.add_argument("--nproc-per-node", type=int, default=1, help="ranks on this node (default 1)")
    parser.add_argument("--log-dir", type=Path, help="one log per rank and generation (default: a new folder in /tmp)")
    parser.add_argument("--state-dir", type=Path, help="keeps learned imports (default: the user's state folder)")
    parser.add_argument("--tee", type=int, nargs="*", default=[], help="local ranks whose output is shown here too")
    parser.add_argument(
        "--start-method",
        choices=["learn", "warm", "cold"],
        default=os.environ.get("GEMINI_FT_START_METHOD", "learn"),
        help="learn: fork from a server that preloads what the script imports (default); "
        "warm: preload torch only; cold: a new interpreter for each rank",
    )
    add_log_format(parser)
    parser.add_argument("-m", dest="is_module", action="store_true", help="the command names a module")
    parser.add_argument("command", nargs="+", help="script or module, and its arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher and return its exit code.

    0: the job has ended well, or ended without this node's ranks failing it; 1: the job failed; 2: wrong usage;
    69: no agent, or the agent refused; 128+n: ended by signal n.
    """
    args = _parser().parse_args(argv)
    configure_logging("launcher", args.log_format, lambda: {"job_id": args.job})
    try:
        return _run(args)
    except ConfigurationError as error:
        print(f"launcher: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except GeminiError as error:
        print(f"launcher: {error}", file=sys.stderr)
        return _EXIT_UNAVAILABLE


def _run(args: argparse.Namespace) -> int:
    target, *arguments = args.command
    if not args.is_module and not Path(target).is_file():
        raise ConfigurationError(f"there is no script {target} (working directory {os.getcwd()})")
    if args.nproc_per_node < 1:
        raise ConfigurationError(f"--nproc-per-node must be at least 1, not {args.nproc_per_node}")
    if args.nproc_per_node > 1 and "OMP_NUM_THREADS" not in os.environ:
        logger.warning("OMP_NUM_THREADS is not set: using 1 for each of the %d ranks", args.nproc_per_node)
        os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GEMINI_FT_AGENT_SOCKET"] = os.path.abspath(args.agent_socket)
    os.environ["GEMINI_FT_JOB"] = args.job
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="gemini-ft-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    logger.info("the ranks' logs are in %s", log_dir)
    identity = target if args.is_module else os.path.abspath(target)
    template = RankOrder(
        target=identity,
        is_module=args.is_module,
        arguments=arguments,
        environ={},
        log_path="",
        work_dir=os.getcwd(),
    )
    reported: Path | None = None
    starter: RankStarter
    # Before torch is imported here, so that the server's imports run beside this process's own.
    if args.start_method == "cold":
        starter = ColdStarter()
    elif args.start_method == "warm":
        starter = WarmStarter(log_dir)
    else:
        state_dir = args.state_dir or _default_state_dir()
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        reported = reported_path(state_dir, args.job, args.agent_socket)
        starter = WarmStarter(log_dir, learned_path(state_dir, identity), reported)
    try:
        return _supervise(args, template, starter, log_dir, reported)
    finally:
        starter.close()


def _default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "gemini-ft" / "launcher"


def _supervise(
    args: argparse.Namespace, template: RankOrder, starter: RankStarter, log_dir: Path, reported: Path | None
) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from gemini_ft.agent.launcher.agent_link import SocketAgentLink
    from gemini_ft.agent.launcher.elastic import GeminiElasticAgent
    from gemini_ft.agent.launcher.rank_context import RankLogs
    from gemini_ft.agent.launcher.rendezvous import GeminiRendezvousHandler

    link = SocketAgentLink(os.environ["GEMINI_FT_AGENT_SOCKET"], args.job, args.nproc_per_node)
    # A standby's server learns what the other nodes' ranks import while it waits for a slot.
    handler = GeminiRendezvousHandler(link, args.job, while_parked=starter.poll)
    agent = GeminiElasticAgent(
        handler, starter, template, args.nproc_per_node, RankLogs(log_dir, frozenset(args.tee)), reported
    )
    try:
        agent.run()
    except SignalException as error:
        logger.warning("ended by %s", error.sigval.name)
        return 128 + int(error.sigval)
    except RendezvousError as error:
        print(f"launcher: {error}", file=sys.stderr)
        return _EXIT_UNAVAILABLE
    finally:
        link.close(timedelta(seconds=5))
    outcome = handler.closed.facts.get("outcome", "stopped") if handler.closed else "succeeded"
    logger.info("job %s: %s", args.job, outcome)
    return _EXIT_FAILED if outcome == "failed" else 0

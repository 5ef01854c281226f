"""`python -m gemini_ft.failure_detector`: the service as a process."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from gemini_ft.contracts.errors import GeminiError
from gemini_ft.contracts.logs import add_log_format, configure_logging
from gemini_ft.failure_detector.metrics import DetectorMetrics
from gemini_ft.failure_detector.service import FailureDetector
from gemini_ft.failure_detector.settings import DetectorSettings
from gemini_ft.metrics_listener import serve_metrics
from gemini_ft.security.nats_access import NatsAccess, add_nats_options

_log = logging.getLogger("gemini_ft.failure_detector")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal ends it; a refusal is one sentence on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m gemini_ft.failure_detector", description=__doc__)
    add_nats_options(parser)
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="written once heartbeats are heard")
    parser.add_argument(
        "--metrics-listen", metavar="HOST:PORT", help="serve metrics for Prometheus there (default: nowhere)"
    )
    add_log_format(parser)
    arguments = parser.parse_args(argv)
    configure_logging("failure-detector", arguments.log_format)
    try:
        settings = DetectorSettings.from_environment(os.environ)
        detector = FailureDetector(NatsAccess.of(arguments), settings)
        asyncio.run(_run(detector, arguments.ready_file, arguments.metrics_listen))
    except GeminiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


async def _run(detector: FailureDetector, ready_file: Path | None, metrics_listen: str | None) -> None:
    async with AsyncExitStack() as stack:
        if metrics_listen is not None:
            url = await stack.enter_async_context(serve_metrics(metrics_listen, DetectorMetrics(detector)))
            _log.info("serving metrics at %s", url)
        serving = asyncio.ensure_future(detector.run())
        ready = asyncio.ensure_future(detector.ready.wait())
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready_file is not None:
            draft = ready_file.with_name(f"{ready_file.name}.draft")
            draft.write_text(f"{os.getpid()}\n")
            draft.replace(ready_file)
        ready.cancel()
        await serving


if __name__ == "__main__":
    sys.exit(main())

"""`python -m gemini_ft.failure_detector`: the service as a process."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gemini_ft.contracts.errors import ConfigurationError, GeminiError
from gemini_ft.failure_detector.service import FailureDetector
from gemini_ft.failure_detector.settings import DetectorSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal ends it; a refusal is one sentence on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m gemini_ft.failure_detector", description=__doc__)
    parser.add_argument("--nats", required=True, metavar="URL")
    parser.add_argument("--nats-token-file", type=Path, metavar="FILE")
    parser.add_argument("--ready-file", type=Path, metavar="FILE", help="written once heartbeats are heard")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        token = None if arguments.nats_token_file is None else _read_token(arguments.nats_token_file)
        settings = DetectorSettings.from_environment(os.environ)
        asyncio.run(_run(FailureDetector(arguments.nats, token, settings), arguments.ready_file))
    except GeminiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _read_token(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigurationError(
            f"the token file {path} cannot be read: {error.strerror}; check --nats-token-file"
        ) from error


async def _run(detector: FailureDetector, ready_file: Path | None) -> None:
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

"""`healthcheck.py URL [LINE]`: status 0 if URL answers and, if given, its answer has this line."""

import sys
import urllib.request

_TIMEOUT_S = 3.0


def main(url: str, *lines: str) -> int:
    """Return the exit status; one sentence on stderr says what is wrong."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            found = answer.read().decode().splitlines()
    except OSError as error:
        print(f"{url} does not answer: {error}", file=sys.stderr)
        return 1
    missing = [line for line in lines if line not in found]
    for line in missing:
        print(f"{url} answers, but without the line {line!r}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Importing the library costs torch and nothing else; adapters are imported by name only."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_worker_library_imports_no_framework_and_starts_no_device() -> None:
    program = (
        "import gemini_ft.worker, sys, threading, torch;"
        "bad = {'deepspeed', 'transformers', 'accelerate', 'fastapi', 'sqlalchemy', 'nats'} & set(sys.modules);"
        "assert not bad, bad;"
        "assert not torch.cuda.is_initialized();"
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

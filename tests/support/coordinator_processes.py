"""Coordinators as processes of their own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
from coordinator_cluster import API_TOKEN, Stack, eventually

from gemini_ft.security.secret_files import write_secret


class Processes:
    """Coordinators as real processes."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self._folder = folder
        self._nats_url = stack.nats.url
        self.running: list[subprocess.Popen[bytes]] = []
        for name, secret in (("database", stack.database_url), ("nats", stack.nats_token), ("api", API_TOKEN)):
            write_secret(folder / name, f"{secret}\n")

    def start(self, **changed: str) -> tuple[subprocess.Popen[bytes], Path]:
        ready = self._folder / f"ready.{len(self.running)}"
        options = {
            "--database-url-file": str(self._folder / "database"),
            "--nats": self._nats_url,
            "--nats-token-file": str(self._folder / "nats"),
            "--api-token-file": str(self._folder / "api"),
            "--listen": "127.0.0.1:0",
            "--ready-file": str(ready),
        } | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
        argv = [sys.executable, "-m", "gemini_ft.coordinator", *(word for pair in options.items() for word in pair)]
        process = subprocess.Popen(argv, stderr=subprocess.PIPE)
        self.running.append(process)
        return process, ready

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


async def api_of(ready: Path) -> httpx.AsyncClient:
    """A client of the coordinator with this ready file, once it serves."""
    await eventually(ready.exists, "the coordinator to be ready", 30)
    url = await asyncio.to_thread(lambda: ready.read_text().strip())
    return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {API_TOKEN}"}, timeout=20)


async def in_phase(api: httpx.AsyncClient, job_id: str, phase: str, generation: int) -> None:
    """Wait until this coordinator shows the job so."""

    async def there() -> bool:
        answer = await api.get(f"/v1/jobs/{job_id}")
        job = answer.json()
        return answer.status_code == 200 and (job["phase"], job["generation"]) == (phase, generation)

    await eventually(there, f"{job_id} to be {phase} at generation {generation}", 30)


async def leads(api: httpx.AsyncClient) -> bool:
    """Whether this coordinator leads, as it says itself."""
    readiness = await api.get("/readyz")
    return readiness.status_code == 200 and bool(readiness.json()["leader"])

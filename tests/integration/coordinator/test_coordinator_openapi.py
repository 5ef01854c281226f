"""The OpenAPI document is a promise, and the service keeps it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from coordinator_cluster import API_TOKEN, Running, SimulatedCluster
from served_api import served
from simulated_logs import answering_for_logs

from gemini_ft.coordinator.api.app import openapi_document

FROZEN = Path(__file__).with_name("openapi.json")
REWRITE = f"GEMINI_FT_REWRITE_OPENAPI=1 python -m pytest {Path(__file__).name} -k frozen"

OPTIONS = (
    *("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "5", "--max-time", "40"),
    *("--generation-deterministic", "--no-color", "--request-timeout", "10"),
    # A stream has no end; it has tests of its own.
    *("--exclude-path", "/v1/events/stream"),
    # More replicas than nodes, for instance, can be written down in the schema's terms.
    *("--exclude-checks", "positive_data_acceptance"),
)


def test_the_document_is_frozen() -> None:
    document = json.dumps(openapi_document(), indent=1, sort_keys=True) + "\n"
    if os.environ.get("GEMINI_FT_REWRITE_OPENAPI"):
        FROZEN.write_text(document)
    assert json.loads(document) == json.loads(FROZEN.read_text()), (
        f"the API has changed; if that is meant, say so in CHANGELOG.md and write the new document by:\n  {REWRITE}"
    )


async def test_the_document_is_served_as_it_is_frozen(running: Running) -> None:
    assert (await running.get("/v1/openapi.json")) == json.loads(FROZEN.read_text())


async def test_schemathesis_finds_nothing(running: Running, cluster: SimulatedCluster, tmp_path: Path) -> None:
    await cluster.add(3)
    await running.until(await running.create(num_nodes=2), "running", 1)
    async with served(running) as api, answering_for_logs(cluster) as logs:
        logs.written[1, 0] = b"a line\n" * 1000
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{api.base_url}/v1/openapi.json"),
            *("--header", f"Authorization: Bearer {API_TOKEN}", *OPTIONS),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()

"""The examples run without Gemini-FT, and with it survive a SIGKILL of every rank, ending bit-identical."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gemini_ft.worker.testing import SoloAgent

EXAMPLES = Path(__file__).parents[3] / "examples"


def _torchrun(folder: Path, script: str, *options: str, environment: dict[str, str]) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with (folder / "log").open("wb") as log:
        return subprocess.run(
            [*command, str(EXAMPLES / script), "--steps", "7", "--batch", "1", *options],
            env=os.environ | settings | environment,
            stdout=log,
            stderr=log,
            cwd=folder,
            timeout=110,
            check=False,
        ).returncode


def _losses(path: Path) -> dict[int, dict[int, str]]:
    """Loss of every step of every rank; of a step that was done again, both must agree."""
    found: dict[int, dict[int, str]] = {}
    for rank in range(2):
        losses = found.setdefault(rank, {})
        for line in path.with_name(f"{path.name}.{rank}").read_text().splitlines():
            entry = json.loads(line)
            assert losses.setdefault(entry["step"], entry["loss"]) == entry["loss"]
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "fault"),
    [("train_ddp.py", "rank.after_chunk:300=kill"), ("train_gpt_deepspeed.py", "rank.before_sealed:4=kill")],
)
def test_an_example_that_is_killed_ends_as_if_it_had_not_been(tmp_path: Path, script: str, fault: str) -> None:
    outputs = {name: tmp_path / name for name in ("undisturbed", "killed")}
    options = {
        name: ("--loss-log", str(path / "losses"), "--digest-out", str(path / "digests"))
        for name, path in outputs.items()
    }
    for path in outputs.values():
        path.mkdir()
    code = _torchrun(outputs["undisturbed"], script, *options["undisturbed"], "--no-checkpoint", environment={})
    assert code == 0, (outputs["undisturbed"] / "log").read_text()[-3000:]
    memory = Path(tempfile.mkdtemp(prefix="gft", dir="/dev/shm"))
    try:
        with SoloAgent(memory, world_size=2) as agent:
            armed = agent.environment() | {"GEMINI_FT_FAULT": fault}
            assert _torchrun(outputs["killed"], script, *options["killed"], environment=armed) != 0
            restored = agent.recover()
            assert restored is not None
            code = _torchrun(outputs["killed"], script, *options["killed"], environment=agent.environment())
            assert code == 0, (outputs["killed"] / "log").read_text()[-3000:]
    finally:
        shutil.rmtree(memory)
    assert _losses(outputs["killed"] / "losses") == _losses(outputs["undisturbed"] / "losses")
    digests = [json.loads((path / "digests").read_text()) for path in outputs.values()]
    assert digests[0] == digests[1]

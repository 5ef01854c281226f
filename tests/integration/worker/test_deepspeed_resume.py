"""Two real ranks of DeepSpeed ZeRO-3 stop and resume twice; every loss and every byte is as if they had not."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORLD_SIZE = 2
STOP = 2


def _run(folder: Path, name: str, *, start: Path | None, first: int, last: int, keep: int) -> list[dict[str, Any]]:
    """Train steps first..last in fresh processes and return what each rank reports."""
    folder = folder / name
    folder.mkdir()
    ranks = []
    for rank in range(WORLD_SIZE):
        job = {
            "rank": rank,
            "rendezvous": f"file://{folder}/rendezvous",
            "start": start and str(start / f"{rank}"),
            "first": first,
            "last": last,
            "keep": keep,
            "out": str(folder / f"{rank}"),
        }
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
        with (folder / f"log{rank}").open("wb") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, __file__, json.dumps(job)], env=environment, stdout=log, stderr=log, cwd=folder
                )
            )
    try:
        codes = [rank.wait(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    assert codes == [0] * WORLD_SIZE, f"{codes}\n" + "\n".join(
        (folder / f"log{r}").read_text()[-3000:] for r in range(WORLD_SIZE)
    )
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.timeout(300)
def test_two_resumes_end_bit_identical(tmp_path: Path) -> None:
    undisturbed = _run(tmp_path, "undisturbed", start=None, first=0, last=6, keep=STOP)
    first = _run(tmp_path, "first", start=tmp_path / "undisturbed", first=STOP, last=STOP + 2, keep=STOP + 2)
    second = _run(tmp_path, "second", start=tmp_path / "first", first=STOP + 2, last=6, keep=6)
    for whole, *parts in zip(undisturbed, first, second, strict=True):
        assert whole["losses"][STOP:] == parts[0]["losses"] + parts[1]["losses"]
        assert len(set(whole["losses"])) == 6
        assert parts[1]["state"] == whole["state"]
        assert parts[1]["parameters"] == whole["parameters"]
        for report in (whole, *parts):
            assert report["addresses_stable"]
            assert report["predicted_bytes"] == report["bytes"]
            assert "inside the accumulation of gradients" in report["refusal"]


def _main(job: dict[str, Any]) -> None:
    import gc
    import random

    import deepspeed
    import numpy as np
    import torch

    from gemini_ft.contracts.errors import StateError
    from gemini_ft.worker._blocks import dense_block
    from gemini_ft.worker.deepspeed import DeepSpeedState
    from gemini_ft.worker.rng import RngState
    from gemini_ft.worker.state_codec import Manifest, check_match, flatten, unflatten

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 32)
            self.frozen = torch.nn.Linear(32, 32).requires_grad_(False)
            self.wide = torch.nn.Sequential(torch.nn.Linear(32, 400), torch.nn.GELU(), torch.nn.Linear(400, 33))
            self.drop = torch.nn.Dropout(0.2)
            self.head = torch.nn.Linear(33, 50)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.head(self.drop(self.wide(self.frozen(self.embed(ids)))))  # type: ignore[no-any-return]

    # As in the example: else an optional op is compiled, and a rank killed meanwhile leaves a lock that stops them all.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed(
        dist_backend="gloo",
        auto_mpi_discovery=False,
        init_method=job["rendezvous"],
        rank=job["rank"],
        world_size=WORLD_SIZE,
    )
    torch.manual_seed(11)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 1000,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 2000, "sub_group_size": 9000},
    }
    engine, *_ = deepspeed.initialize(model=Net(), config=config)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(job["rank"])
    parts = {"engine": DeepSpeedState(engine), "rng": RngState()}
    assert 0 < len(engine.optimizer.persistent_parameters) < 8
    assert len(engine.optimizer.fp16_groups) > 1

    predicted = flatten({name: part.state_dict() for name, part in parts.items() if name == "rng"}).layout.num_bytes
    predicted += flatten({"engine": parts["engine"].predicted_state_dict()}, allow_meta=True).layout.num_bytes  # type: ignore[attr-defined]
    if job["start"]:
        data = Path(job["start"] + ".data").read_bytes()
        saved = Manifest.from_json(Path(job["start"] + ".manifest").read_bytes())
        ends = [0]
        for spec in saved.tensors:
            ends.append(ends[-1] + (0 if spec.alias_of is not None else spec.num_bytes))
        live_state = {"engine": parts["engine"].predicted_state_dict(), "rng": parts["rng"].state_dict()}  # type: ignore[attr-defined]
        live = flatten(live_state, allow_meta=True)
        check_match(saved, live)
        state = unflatten(
            saved, lambda i, block: block.numpy().data.__setitem__(slice(None), data[ends[i] : ends[i + 1]]), live
        )
        for name, part in parts.items():
            part.load_state_dict(state[name])

    data_rng = torch.Generator()
    losses, addresses, refusal = [], set(), ""
    for step in range(job["first"], job["last"]):
        for micro in range(2):
            ids = torch.randint(50, (4, 9), generator=data_rng.manual_seed(1000 * step + 10 * micro + job["rank"]))
            loss = torch.nn.functional.cross_entropy(engine(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            if micro == 0:
                with pytest.raises(StateError) as refused:
                    parts["engine"].state_dict()
                refusal = str(refused.value)
        losses.append(loss.item().hex())
        flat = flatten({name: part.state_dict() for name, part in parts.items()})
        addresses.add(tuple(t.data_ptr() for t, s in zip(flat.tensors, flat.specs, strict=True) if "engine" in s.path))
        blocks = b"".join(
            dense_block(t).numpy().tobytes()
            for t, s in zip(flat.tensors, flat.specs, strict=True)
            if s.alias_of is None
        )
        if step + 1 == job["keep"]:
            Path(job["out"] + ".data").write_bytes(blocks)
            Path(job["out"] + ".manifest").write_bytes(flat.manifest((0,) * len(flat.specs)).to_json())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        parameters = [dense_block(p.detach()).numpy().tobytes().hex() for p in engine.module.parameters()]
    report = {
        "losses": losses,
        "state": hashlib.sha256(blocks + flat.manifest((0,) * len(flat.specs)).to_json()).hexdigest(),
        "parameters": hashlib.sha256(repr(parameters).encode()).hexdigest(),
        "addresses_stable": len(addresses) == 1,
        "predicted_bytes": predicted,
        "bytes": flat.layout.num_bytes,
        "refusal": refusal,
    }
    Path(job["out"] + ".json").write_text(json.dumps(report))
    # The engine lies in reference cycles that hold Gloo's threads, which must end before the interpreter does.
    del engine, parts, flat
    gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))

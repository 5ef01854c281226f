"""Train a byte-level GPT with DeepSpeed ZeRO-3 on the CPU, with a checkpoint of every step in memory.

gemini-ft run --standalone --nproc-per-node 2 examples/train_gpt_deepspeed.py --steps 50
torchrun --nproc-per-node 2 examples/train_gpt_deepspeed.py --steps 50 --no-checkpoint
"""

from __future__ import annotations

import random

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from _corpus import Batches, standard_library_text
from _gpt import Gpt
from _run_log import LossLog, arguments, leave, write_digests

import gemini_ft.worker.deepspeed as gemini_ft_deepspeed

LENGTH = 64

# Else DeepSpeed compiles an optional op at its first start, where a rank that is killed leaves a lock which stops all
# later starts, and asks the compiler about it at every other one.
deepspeed.ops.__compatible_ops__ = {}


def config(batch: int) -> dict[str, object]:
    """Return the DeepSpeed configuration."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 4096},
        "steps_per_print": 1_000_000,
    }


def main() -> None:
    """Train until --steps, from the newest version in memory if there is one."""
    args = arguments(__doc__.partition("\n")[0])
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(args.seed)
    engine, *_ = deepspeed.initialize(model=Gpt(length=LENGTH), config=config(args.batch))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed * 1009 + dist.get_rank())
    data = Batches(standard_library_text(), args.batch, LENGTH, args.seed, dist.get_rank())
    losses = LossLog(args.loss_log, args.pace)

    checkpointer = None if args.no_checkpoint else gemini_ft_deepspeed.checkpointer(engine, {"data": data})
    start = checkpointer.restore() if checkpointer else None
    for step in range(0 if start is None else start + 1, args.steps):
        ids = data.draw()
        loss = engine(ids[:, :-1], ids[:, 1:])
        engine.backward(loss)
        engine.step()
        if checkpointer:
            checkpointer.step(step)
        losses.write(step, loss, checkpointer and checkpointer.committed_step)

    write_digests(args.digest_out, gemini_ft_deepspeed.DeepSpeedState(engine).state_dict())
    if checkpointer:
        checkpointer.close()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()

"""Train a byte-level GPT with plain PyTorch DDP, with a checkpoint of every step in memory: three lines of Gemini-FT.

gemini-ft run --standalone --nproc-per-node 2 examples/train_ddp.py --steps 50
torchrun --nproc-per-node 2 examples/train_ddp.py --steps 50 --no-checkpoint
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from _corpus import Batches, standard_library_text
from _gpt import Gpt
from _run_log import LossLog, arguments, leave, write_digests
from torch.nn.parallel import DistributedDataParallel

from gemini_ft.worker import Checkpointer

LENGTH = 64


def train(args: argparse.Namespace) -> None:
    """Train until --steps, from the newest version in memory if there is one."""
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Gpt(width=128, num_heads=4, length=LENGTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    torch.manual_seed(args.seed * 1009 + dist.get_rank())
    data = Batches(standard_library_text(), args.batch, LENGTH, args.seed, dist.get_rank())
    losses = LossLog(args.loss_log, args.pace)

    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}
    checkpointer = None if args.no_checkpoint else Checkpointer(parts)
    start = checkpointer.restore() if checkpointer else None
    for step in range(0 if start is None else start + 1, args.steps):
        ids = data.draw()
        loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if checkpointer:
            checkpointer.step(step)
        losses.write(step, loss, checkpointer and checkpointer.committed_step)

    write_digests(args.digest_out, {name: part.state_dict() for name, part in parts.items()})
    if checkpointer:
        checkpointer.close()


def main() -> None:
    """Set up torch.distributed and train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(arguments(__doc__.partition("\n")[0]))
    # DDP lies in a reference cycle that holds Gloo's threads, which must end before the interpreter does.
    gc.collect()
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()

"""The seam between staging and devices; the CUDA half runs only where there is a GPU."""

from __future__ import annotations

import mmap

import pytest
import torch

from gemini_ft.contracts.errors import UnavailableError
from gemini_ft.worker.device_copy import HostCopier, PinnedMapping, copier_for

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_host_copier_takes_its_digest_from_the_source() -> None:
    source = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    target = bytearray(5000)
    copier = copier_for(torch.device("cpu"))
    assert isinstance(copier, HostCopier)
    digested = copier.copy(source, memoryview(target))
    target[0] ^= 255
    assert bytes(digested) == source.numpy().tobytes() != bytes(target)


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(UnavailableError, match="tensors on xla:0 cannot be staged"):
        copier_for(torch.device("xla:0"))


@needs_cuda
def test_cuda_copies_come_after_what_was_queued_and_are_complete_on_return() -> None:
    memory = mmap.mmap(-1, 64 << 20)
    view = memoryview(memory)
    pinned = PinnedMapping(view)
    device = torch.device("cuda", torch.cuda.current_device())
    block = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    torch.cuda._sleep(50_000_000)  # the fill below is still queued when copying begins
    block.fill_(7)
    copier = copier_for(device)
    copier.prepare()
    for start in range(0, len(view), 1 << 20):
        copier.copy(block[start : start + (1 << 20)], view[start : start + (1 << 20)])
    assert bytes(view) == b"\7" * (64 << 20)
    pinned.close()
    view.release()
    memory.close()

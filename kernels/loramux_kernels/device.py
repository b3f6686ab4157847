"""Properties of the machine: which implementation serves a tensor, which dtypes the processor multiplies, host memory
that a GPU copies from, and copies that the host does not wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loramux_kernels.native.loader import bf16_unit

LARGE_PAGE = 2 << 20


def runs_triton(tensor: torch.Tensor) -> bool:
    """Return whether the Triton kernels serve `tensor`: it is on a GPU, or a test has set TRITON_INTERPRET=1."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def zeros_in_large_pages(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of zeros on the host, in pages of 2 MiB if the kernel gives them.

    A step reads weights from end to end. They fill many more pages of 4 KiB than the processor has entries to translate
    addresses. Physical memory is allocated only when it is written. The remainder after the last full large page gets a
    large page too, unless that adds more than an eighth of the size.
    """
    num_bytes = elements * dtype.itemsize
    if num_bytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(elements, dtype=dtype)
    rounded_up = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    in_large_pages = rounded_up if rounded_up - num_bytes <= num_bytes // 8 else rounded_up - LARGE_PAGE
    # A large page begins only at a multiple of its size: this needs one additional page of address space, which is
    # never written.
    memory = mmap.mmap(-1, rounded_up + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    start = -mapped.data_ptr() % LARGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, in_large_pages)
    return mapped[start : start + num_bytes].view(dtype)


def return_freed_memory() -> None:
    """Have the C library return freed pieces of memory to the machine: after loading they exceed the weights' own
    size."""
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory on the host from which `device` can copy without the host's help."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def stage(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return `array` in memory from which `device` can copy without the host; torch keeps the memory until the copy has
    ended.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a copy on `device`; a GPU copies from pinned memory while the host continues."""
    return stage(array, device).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, which is complete once the stream has reached this point."""
    return host_memory(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)


def kept_for_steps(tensor: torch.Tensor) -> torch.Tensor:
    """Allow the steps to use `tensor`, which was made on a stream other than theirs, and return it.

    The allocator immediately gives freed memory back to its original stream. After this call it first waits until the
    steps that were launched before the memory was freed have ended.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.default_stream(tensor.device))
    return tensor


MOST_ROWS_BESIDE = 128
"""Maximum number of rows of a base's product that leaves multiprocessors free for another launch. With 512 rows, no
time was saved.
"""


class SideStream:
    """A second stream of a GPU for launches that need not wait for the launch before.

    This stream is used only while a CUDA graph is recorded, because the branches of a graph cost no host time. If
    launches were enqueued one by one, the events would cost the host more than the overlap gains.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def beside(self, rows: int) -> Iterator[Callable[[], None]]:
        """Launch on the second stream, after the main stream's work so far; yield a function that makes the main stream
        wait.

        Tensors that are read here must not be freed before that function is called. `rows` is the number of rows of the
        main stream's launch.
        """
        stream = self._stream
        if stream is None or rows > MOST_ROWS_BESIDE or not torch.cuda.is_current_stream_capturing():
            yield lambda: None
            return
        main = torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            yield lambda: main.wait_stream(stream)


def aligned_rows(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return `array` `[k, n]` on `device`. Every row begins at a multiple of 16 bytes: for other addresses Triton would
    compile another variant."""
    count, step = array.shape[1], 16 // array.itemsize
    padded = np.zeros((len(array), -(-count // step) * step), dtype=array.dtype)
    padded[:, :count] = array
    return to_device(padded, device)[:, :count]


def multiplies_in_hardware(dtype: torch.dtype) -> bool:
    """Return whether this processor has instructions for matrix products of `dtype` and need not emulate them."""
    if dtype == torch.bfloat16:
        is_reported = any(map(_torch_reports, ("amx_tile", "avx512_bf16")))
        return is_reported or bf16_unit() > 0 or _has_arm_feature("bf16")
    if dtype == torch.float16:
        return _torch_reports("amx_fp16") or _has_arm_feature("fphp")
    return True


def _torch_reports(feature: str) -> bool:
    """Call one of torch's private predicates, which another version may lack."""
    probe = getattr(torch.cpu, f"_is_{feature}_supported", None)
    return probe is not None and bool(probe())


@functools.cache
def _has_arm_feature(feature: str) -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    return any(feature in line.split() for line in lines if line.startswith("Features"))

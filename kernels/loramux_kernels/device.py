"""What the machine can do: which implementation serves a tensor, which dtypes the processor multiplies, host memory
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

from loramux_kernels.native.loader import multiplies_bf16_pairs

LARGE_PAGE = 2 << 20


def runs_triton(tensor: torch.Tensor) -> bool:
    """Return whether the Triton kernels serve `tensor`: on a GPU, or in tests anywhere under TRITON_INTERPRET=1."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def zeros_in_large_pages(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor of zeros on the host, in pages of 2 MiB where the kernel gives them.

    What a step streams through has many more pages of 4 KiB than the processor has entries to translate them. Nothing
    is taken of the machine's memory before it is written; what does not fill its last large page lies in small ones,
    where a large one would add more than an eighth.
    """
    num_bytes = elements * dtype.itemsize
    if num_bytes < LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(elements, dtype=dtype)
    rounded_up = -(-num_bytes // LARGE_PAGE) * LARGE_PAGE
    in_large_pages = rounded_up if rounded_up - num_bytes <= num_bytes // 8 else rounded_up - LARGE_PAGE
    # Only addresses that are multiples of its size begin a large page: one more of address space, never written.
    memory = mmap.mmap(-1, rounded_up + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    start = -mapped.data_ptr() % LARGE_PAGE
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, in_large_pages)
    return mapped[start : start + num_bytes].view(dtype)


def return_freed_memory() -> None:
    """Have the C library return to the machine what was freed in pieces: after loading, more than the weights take."""
    with contextlib.suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def host_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory on the host from which `device` can copy by itself."""
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")


def stage(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return `array` where `device` can copy it from by itself; torch keeps the memory until that has happened."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a copy on `device`; a GPU copies from pinned memory while the host goes on."""
    return stage(array, device).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, which is complete once the stream has come so far."""
    return host_memory(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)


def kept_for_steps(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, which another stream than the steps' has made and the steps read.

    The allocator gives freed memory back to the stream that it came from, at once. With this it waits until the steps
    that were launched by then have ended.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.default_stream(tensor.device))
    return tensor


MOST_ROWS_BESIDE = 128
"""Rows of a base's product that leaves multiprocessors room for another launch: with 512 rows nothing was won."""


class SideStream:
    """A second stream of a GPU, for a launch that need not wait for the one before.

    It is used while a CUDA graph is recorded, whose branches cost the host nothing: launched one by one, the events
    would cost it more than is won.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def beside(self, rows: int) -> Iterator[Callable[[], None]]:
        """Launch on it, after what the main stream was given so far; yields what makes the main one wait for the end.

        Until that is called, nothing that is read here may be freed. `rows` are those of the launch beside it.
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
    """Return `array` `[k, n]` on `device`, every row beginning at 16 bytes: Triton compiles anew for one that does
    not."""
    count, step = array.shape[1], 16 // array.itemsize
    padded = np.zeros((len(array), -(-count // step) * step), dtype=array.dtype)
    padded[:, :count] = array
    return to_device(padded, device)[:, :count]


def has_bf16_tiles() -> bool:
    """Return whether the processor multiplies bf16 matrices by tiles (AMX), which oneDNN knows how to use."""
    return _torch_reports("amx_tile")


def multiplies_in_hardware(dtype: torch.dtype) -> bool:
    """Return whether this processor has instructions for matrix products of `dtype`, so that nothing is emulated."""
    if dtype == torch.bfloat16:
        return has_bf16_tiles() or multiplies_bf16_pairs() or _torch_reports("avx512_bf16") or _has_arm_feature("bf16")
    if dtype == torch.float16:
        return _torch_reports("amx_fp16") or _has_arm_feature("fphp")
    return True


def _torch_reports(feature: str) -> bool:
    """Ask one of torch's private predicates, which may be gone in another version."""
    probe = getattr(torch.cpu, f"_is_{feature}_supported", None)
    return probe is not None and bool(probe())


@functools.cache
def _has_arm_feature(feature: str) -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    return any(feature in line.split() for line in lines if line.startswith("Features"))

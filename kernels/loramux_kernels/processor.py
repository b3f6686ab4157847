"""Facts of this machine's processor that decide how matrices are held and multiplied."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from loramux_kernels.native import multiplies_bf16_pairs


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

"""Every kernel variant that the launchers choose from, as launches on small tensors of representative shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from loramux_kernels.cuda.launch import Launch
from loramux_kernels.cuda.lora_expand import prepare_expand
from loramux_kernels.cuda.lora_shrink import new_intermediate, prepare_shrink
from loramux_kernels.table import LoraGroup, LoraTable, Segments


@dataclass(frozen=True)
class Variant:
    """A launch with a name to find it by."""

    name: str
    launch: Launch


def all_variants() -> list[Variant]:
    """What has to compile."""
    return list(_lora())


def _lora() -> Iterator[Variant]:
    steps = {"row": ((0, 1, 2), 64), "short": ((0, 20, 40), 64), "long": ((0, 200, 400), 64), "long-r16": ((0, 200, 400), 16)}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for name, (cu_seqlens, rank) in steps.items():
            yield from _lora_pair(f"{name}-{_short(dtype)}", Segments(cu_seqlens, (0, 1)), rank, dtype)
    odd = LoraGroup((0, 1), (130, 66))
    yield from _lora_pair("row-bf16-odd", Segments((0, 1), (0,)), 16, torch.bfloat16, odd)


def _lora_pair(
    name: str, segments: Segments, rank: int, dtype: torch.dtype, group: LoraGroup | None = None
) -> Iterator[Variant]:
    group = group or LoraGroup((0, 1, 2), (4096, 1024, 1024))
    offsets = torch.zeros(2, 7, 16, dtype=torch.int64)
    table = LoraTable(offsets, offsets, torch.full((2, 7), rank, dtype=torch.int32), torch.ones(2, 7))
    x = torch.empty(segments.rows, 4096, dtype=dtype)
    y = torch.empty(segments.rows, group.out_starts[-1], dtype=dtype)
    v = new_intermediate(x, group, segments, table)
    for launch in prepare_shrink(x, x.view(-1), table, group, segments, v):
        yield Variant(f"shrink-{name}", launch)
    for launch in prepare_expand(v, x.view(-1), table, group, segments, y):
        yield Variant(f"expand-{name}", launch)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]

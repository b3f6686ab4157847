"""Memory that a base takes, from its files' headers and its config: logged, or refused, before it is loaded."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from loramux.engine.execution.attention import KvLayout, UnsupportedModel, probe_layers
from loramux.engine.execution.quantized_checkpoint import format_of, held_bytes, quantized_linears
from loramux.engine.execution.sharded_checkpoint import empty_model, sharded_tensors
from loramux_adapters import BaseDescription
from loramux_adapters.sharding import Sharding

GB = 1e9
TYPICAL_RANK = 64
"""Of the adapters that the plan counts."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of every rank of an engine."""

    num_ranks: int
    weight_bytes: int
    pool_bytes: int
    page_bytes: int
    """0 where it cannot be known without the weights."""
    adapter_bytes: int
    """An adapter of TYPICAL_RANK on all linears."""
    is_quantized: bool = False

    @property
    def total_bytes(self) -> int:
        """Bytes of all ranks."""
        return self.num_ranks * (self.weight_bytes + self.pool_bytes)

    def __str__(self) -> str:
        pages = f" = {self.pool_bytes // self.page_bytes:,} pages" if self.page_bytes else ""
        adapters = self.pool_bytes // self.adapter_bytes if self.adapter_bytes else 0
        where = f" on each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return (
            f"weights {self.weight_bytes / GB:.1f} GB, pool {self.pool_bytes / GB:.1f} GB{pages}, or {adapters:,} "
            f"adapters of rank {TYPICAL_RANK} on all linears{where}"
        )

    def check(self, memory: int) -> None:
        """Raise UnsupportedModel where the machine's `memory` bytes are too few; the message says what would fit."""
        if self.total_bytes <= memory:
            return
        left = (memory - self.num_ranks * self.weight_bytes) // self.num_ranks
        if left >= max(self.page_bytes, 1):
            way_out = f"set engine.pool_bytes to {left} or less"
        elif self.is_quantized:
            way_out = "the weights alone are too large: give a checkpoint of fewer bits, or a larger machine"
        elif self.num_ranks > 1:
            way_out = "the weights alone are too large, and all ranks share this machine: give a larger one"
        else:
            way_out = 'the weights alone are too large: set model.quantization = "int8" or "nf4"'
        raise UnsupportedModel(
            f"{self} do not fit this machine's {memory / GB:.1f} GB of memory; {way_out}. (What other processes and "
            f"the step itself take comes on top.)"
        )


def plan_memory(
    directory: Path,
    base: BaseDescription,
    sharding: Sharding,
    itemsize: int,
    pool_bytes: int,
    block_size: int,
    *,
    has_fp8_kv: bool = False,
) -> MemoryPlan:
    """Plan for weights and keys of `itemsize` bytes an element, and for codes as they are held.

    Raises UnsupportedModel where the files are not safetensors.
    """
    widths = {name: sharding.width(name, s.out_features, s.in_features) for name, s in base.modules.items()}
    form = format_of(vars(sharding.config))
    quantized = () if form is None else quantized_linears(directory, form)
    with sharded_tensors(directory, sharding, 0, without=quantized) as tensors:
        weight_bytes = itemsize * sum(math.prod(tensor.get_shape()) for tensor in tensors.values())
    known = {name: base.modules[name] for name in quantized if name in base.modules}  # loading refuses the others
    for name, num_bytes in held_bytes(directory, known).items():
        weight_bytes += num_bytes * math.prod(widths[name]) // base.modules[name].num_weights
    return MemoryPlan(
        sharding.size,
        weight_bytes,
        pool_bytes,
        _page_bytes(sharding, block_size, itemsize, has_fp8_kv),
        TYPICAL_RANK * itemsize * sum(map(sum, widths.values())),
        is_quantized=form is not None,
    )


def machine_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _page_bytes(sharding: Sharding, block_size: int, itemsize: int, has_fp8_kv: bool) -> int:
    """Return the bytes of a page by a forward without memory; 0 for models whose forward needs values."""
    try:
        return KvLayout(probe_layers(empty_model(sharding)), block_size, itemsize, has_fp8_kv).page_bytes
    except UnsupportedModel:  # some mixtures: which experts compute depends on values
        return 0

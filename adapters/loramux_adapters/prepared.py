"""Adapters that are ready for the pool: their layout, and the contents of their pages.

On a GPU the contents of each page are composed once, in pinned memory, from which the device copies by itself. The
host's cache keeps them in place of the tensors, so a load of a cached adapter is one copy per page. On a CPU the pool
is the host's memory: the cache keeps the tensors, and a load copies each block.

Loader threads share Python's lock with the thread of the steps. An operator of torch gives the lock away, and may wait
5 ms for it. So the blocks are copied by one operator, and not by one for each of an adapter's hundreds of matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from loramux_adapters.components import AdapterPlan
from loramux_adapters.families import reads_other_inputs
from loramux_adapters.weights import AdapterLayout, AdapterWeights, Block
from loramux_kernels.device import host_memory


class PairFacts(NamedTuple):
    """Facts of one module's pair."""

    rank: int
    scale: float


@dataclass(frozen=True, eq=False, slots=True)
class PreparedAdapter:
    """An adapter, fitted to the base, that may be installed any number of times."""

    plan: AdapterPlan
    layout: AdapterLayout
    pairs: Mapping[str, PairFacts]
    """Facts of the pairs that steps read, by module."""
    source: AdapterWeights | tuple[torch.Tensor, ...]
    """The tensors, or the contents of the filled part of each page, in memory from which a GPU copies."""

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory that the adapter occupies."""
        if isinstance(self.source, AdapterWeights):
            return self.source.nbytes
        return sum(pinned_bytes(page.nbytes) for page in self.source)

    def copy_into(self, pool: torch.Tensor, page_elements: int, pages: list[int]) -> None:
        """Copy the adapter into `pages` of the flat `pool`. An adapter may have more pages than it fills."""
        if isinstance(self.source, AdapterWeights):
            targets = [_place(block, pool, pages[block.page] * page_elements) for block in self.layout.blocks]
            _copy_blocks(self.source, self.layout, targets)
            return
        for page, held in zip(pages, self.source, strict=False):
            start = page * page_elements
            pool[start : start + len(held)].copy_(held, non_blocking=True)


def prepare(weights: AdapterWeights, layout: AdapterLayout) -> PreparedAdapter:
    """Prepare an adapter for a pool in the host's memory."""
    assert not weights.magnitudes, "fit_to_base turns them into columns"
    assert not weights.biases, "fit_to_base turns them into columns"
    pairs = {
        name: PairFacts(pair.a.shape[0], pair.scale)
        for name, pair in weights.modules.items()
        if not reads_other_inputs(name)
    }
    return PreparedAdapter(weights.plan, layout, pairs, weights)


def prepare_pages(weights: AdapterWeights, layout: AdapterLayout, pool: torch.Tensor) -> PreparedAdapter:
    """Prepare an adapter for `pool` on a GPU."""
    used = [0] * (1 + max(block.page for block in layout.blocks)) if layout.blocks else []
    for block in layout.blocks:
        used[block.page] = max(used[block.page], block.offset + block.size)
    image = tuple(host_memory((count,), pool.dtype, pool.device) for count in used)
    _copy_blocks(weights, layout, [_place(block, image[block.page], 0) for block in layout.blocks])
    prepared = prepare(weights, layout)
    return PreparedAdapter(prepared.plan, layout, prepared.pairs, image)


def pinned_bytes(num_bytes: int) -> int:
    """Return the bytes that torch pins for a tensor of this size: the next power of two. It pins them until the process
    ends, and gives them to later tensors."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def _place(block: Block, memory: torch.Tensor, start: int) -> torch.Tensor:
    """Return the block's place in the page that begins at `start`."""
    return memory.as_strided((block.rows, block.matrix.width), (block.matrix.width, 1), start + block.offset)


def _copy_blocks(weights: AdapterWeights, layout: AdapterLayout, targets: list[torch.Tensor]) -> None:
    sources = [weights.matrix(block.matrix)[block.start : block.start + block.rows] for block in layout.blocks]
    if targets:
        torch._foreach_copy_(targets, sources)

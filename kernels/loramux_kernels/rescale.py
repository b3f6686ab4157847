"""Semantics: y[s[k]:s[k+1], slice i] = y[...] * factor(slot[k], sites[i]) + shift(slot[k], sites[i]), columnwise."""

from __future__ import annotations

import torch

from loramux_kernels.device import runs_triton
from loramux_kernels.tables import NO_VECTORS, LoraGroup, Segments


def rescale(y: torch.Tensor, pool: torch.Tensor, offsets: torch.Tensor, group: LoraGroup, segments: Segments) -> None:
    """Scale and shift every adapter's rows, in place, for all sites of a group at once.

    `y` `[T, sum(group.out_features)]` with T >= segments.rows, of the pool's dtype, last dimension contiguous, any row
    stride. `offsets` int64[num_slots, num_sites]: where in the pool, counted in elements, a site's factors stand, and
    right behind them its shifts, or NO_VECTORS. Computed in float32 and rounded once.
    """
    if runs_triton(y):
        from loramux_kernels.cuda import rescale as triton_rescale

        triton_rescale.rescale(y, pool, offsets, group, segments)
    else:
        rescale_reference(y, pool, offsets, group, segments)


def rescale_reference(
    y: torch.Tensor, pool: torch.Tensor, offsets: torch.Tensor, group: LoraGroup, segments: Segments
) -> None:
    """`rescale` in torch, on any device and in any floating dtype."""
    found = offsets[list(segments.slots)][:, list(group.sites)].tolist()
    for (_, first, last), starts in zip(segments.spans, found, strict=True):
        for i, (start, width) in enumerate(zip(starts, group.out_features, strict=True)):
            if start != NO_VECTORS:
                factor, shift = pool[start : start + 2 * width].view(2, width)
                part = y[first:last, group.out_starts[i] : group.out_starts[i + 1]]
                part.copy_(torch.addcmul(shift.float(), part.float(), factor.float()))

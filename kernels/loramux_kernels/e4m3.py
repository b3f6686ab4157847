"""Floats of eight bits with a scale for each page and head: how keys and values are held in FP8.

E4M3 (Micikevicius et al., FP8 formats for deep learning, 2022) has four bits of exponent, three of mantissa, no
infinities, and 448 as its largest number. A page's scale comes from the row of its first token alone, so that what a
page holds does not depend on how a prompt was cut into steps, nor on when its other rows came. It is a power of two:
scores and sums can be multiplied with it in any order, exactly. The first row's largest element lies at 2 to 4 of 448,
so that later rows may be a hundred times as large before they are cut off: a model's first token, on which heads rest
their attention, often has values far smaller than all others. Rows a hundred times smaller keep their mantissa.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
HEADROOM = 1
"""The largest element of a page's first row is at least 2 to this power, in units of the scale, and below twice it."""
LEAST_EXPONENT = -100
"""Rows whose elements all lie below 2 to this power, and rows that are not finite, have a scale of 1."""


def scale_for(rows: torch.Tensor) -> torch.Tensor:
    """Return float32`[...]`: the scale of the page that begins with each of `rows` `[..., dim]`."""
    largest = rows.float().abs().amax(-1)
    _, exponent = torch.frexp(largest)  # of a mantissa from 0.5 to 1
    scale = torch.ldexp(torch.ones_like(largest), exponent - 1 - HEADROOM)
    is_usual = largest.isfinite() & (largest >= 2.0**LEAST_EXPONENT)
    return torch.where(is_usual, scale, 1.0)


def encode(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return uint8`[..., dim]`: `rows` in units of `scales` `[...]`, to nearest even, at most LARGEST."""
    steps = (rows.float() / scales[..., None]).clamp(-LARGEST, LARGEST)
    return steps.to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32`[..., dim]`: what `encode` made `codes` of."""
    return codes.view(torch.float8_e4m3fn).float() * scales[..., None]

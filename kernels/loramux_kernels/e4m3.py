"""Floats of eight bits, with a scale for each page and head: the format of keys and values in FP8.

E4M3 (Micikevicius et al., FP8 formats for deep learning, 2022) has four bits of exponent, three of mantissa, no
infinities, and 448 as its largest number. A page's scale depends only on the row of its first token. So the content of
a page depends neither on the division of a prompt into steps nor on the time of its other rows. The scale is a power of
two: scores and sums can be multiplied with it in any order, exactly.

The scale puts the first row's largest element between 2 and 4. E4M3 reaches 448, so later rows may be a hundred times
as large before they are cut off. This headroom is needed because heads often attend to the first token of a sequence,
whose values are far smaller than all others. Rows a hundred times smaller keep their mantissa.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
HEADROOM = 1
"""Power of two that the largest element of a page's first row reaches, in units of the scale; it is less than twice
this power.
"""
LEAST_EXPONENT = -100
"""Exponent of the power of two below which all elements of a row must be for a scale of 1. Rows that are not finite
also have a scale of 1.
"""


def scale_for(rows: torch.Tensor) -> torch.Tensor:
    """Return the scale of the page that begins with each of `rows` `[..., dim]`: float32`[...]`."""
    largest = rows.float().abs().amax(-1)
    _, exponent = torch.frexp(largest)  # frexp's mantissa is from 0.5 to 1
    scale = torch.ldexp(torch.ones_like(largest), exponent - 1 - HEADROOM)
    is_usual = largest.isfinite() & (largest >= 2.0**LEAST_EXPONENT)
    return torch.where(is_usual, scale, 1.0)


def encode(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return uint8`[..., dim]`: `rows` in units of `scales` `[...]`, rounded to nearest even and cut off at LARGEST."""
    steps = (rows.float() / scales[..., None]).clamp(-LARGEST, LARGEST)
    return steps.to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32`[..., dim]`: the inverse of `encode`."""
    return codes.view(torch.float8_e4m3fn).float() * scales[..., None]

"""E4M3 codes by integer arithmetic on the bits of float32: exact, and the same on every GPU and in the interpreter.

GPUs before sm_89 have no instructions for FP8. A float32 holds its exponent in bits 23 to 30 with a bias of 127; a code
holds it in bits 3 to 6 with a bias of 7. `loramux_kernels.e4m3` defines the codes and the scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loramux_kernels import e4m3
from loramux_kernels.tables import KvLayer

_HEADROOM = tl.constexpr(e4m3.HEADROOM)
_LEAST_EXPONENT = tl.constexpr(e4m3.LEAST_EXPONENT)


def scale_arguments(layer: KvLayer) -> dict[str, object]:
    """Return the scales of the pages as arguments of a kernel; all None without FP8."""
    key, value = layer.key_scale, layer.value_scale
    assert key is None or value is None or key.stride(1) == value.stride(1) == 1, "a page's scales are contiguous"
    return {
        "key_scale": key,
        "value_scale": value,
        "key_scale_page": None if key is None else key.stride(0),
        "value_scale_page": None if value is None else value.stride(0),
    }


def passes(layer: KvLayer) -> tuple[bool | None, ...]:
    """Return BEGINS for each launch: True stores tokens that begin a page and sets its scale, False the other tokens.

    Without FP8 one launch stores all tokens: BEGINS is None.
    """
    return (None,) if layer.key_scale is None else (True, False)


@triton.jit
def from_e4m3(codes: tl.tensor) -> tl.tensor:
    """Return the float32 values of `codes`; 0x7f and 0xff become NaN."""
    # E4M3 has four bits of exponent, float32 has eight: the shifts leave four zero bits after the sign. Read as a
    # float32, the result is the value times 2^-120, and E4M3's subnormals are float32 subnormals.
    bits = ((codes.to(tl.int32) << 24) >> 4) & ~0x78000000
    values = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(tl.abs(values) == 480.0, float("nan"), values)


@triton.jit
def to_e4m3(values: tl.tensor) -> tl.tensor:
    """Return the uint8 codes of float32 `values`, rounded to nearest even; magnitudes are capped at 448."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bounded = tl.minimum(size, 0x43E00000)  # 448
    normal = ((bounded + 0x7FFFF + ((bounded >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count steps of 2^-9, which is the value of the last bit of a float32 between 2^14 and 2^15.
    small = (bounded.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(bounded < 0x3C800000, small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def magnitude(values: tl.tensor) -> tl.tensor:
    """Return the bits of float32 `values` without their signs, as int32. Their order is that of the magnitudes; NaN is
    largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_for(largest: tl.tensor) -> tl.tensor:
    """Return the float32 scale of a page if the largest magnitude of its first row is `largest`."""
    exponent = largest >> 23
    is_usual = (exponent >= _LEAST_EXPONENT + 127) & (exponent < 255)
    return tl.where(is_usual, (exponent - _HEADROOM) << 23, 127 << 23).to(tl.float32, bitcast=True)


@triton.jit
def page_scale(scales: tl.tensor, largest: tl.tensor, mask: tl.tensor, BEGINS: tl.constexpr) -> tl.tensor:
    """Return the float32 at `scales`; a row that BEGINS the page first sets it for the magnitude `largest`."""
    if BEGINS:
        scale = scale_for(largest)
        tl.store(scales, scale, mask=mask)
    else:
        scale = tl.load(scales, mask=mask, other=1.0)
    return scale


@triton.jit
def reciprocal(scale: tl.tensor) -> tl.tensor:
    """Return 1 / `scale`, exact: a scale is a power of two."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)

"""The benchmark of quantized weights measures every coding."""

from __future__ import annotations

import torch
from quantized import CODINGS, linears


def test_every_coding_is_measured_with_its_bytes() -> None:
    rows = linears("micro", torch.float32, [1], repeats=1)
    assert [row["form"] for row in rows] == ["unquantized", *(name for name, *_ in CODINGS)]
    plain, *coded = (float(str(row["megabytes"])) for row in rows)
    assert all(size < 0.3 * plain for size in coded)

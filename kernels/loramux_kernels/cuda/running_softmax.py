"""The running softmax of `paged_attention`: a device function that takes a stretch of context into it."""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def absorb(
    q: tl.tensor, sums: tl.tensor, total: tl.tensor, highest: tl.tensor, keys: tl.tensor, values: tl.tensor,
    pages: tl.tensor, start: tl.tensor, stop: tl.tensor, position: tl.tensor, scaling: tl.tensor,
    softcap: tl.tensor, window: tl.tensor, key_page: tl.tensor, key_token: tl.tensor, value_page: tl.tensor,
    value_token: tl.tensor,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr, BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Take tokens [start, stop) into (sums, total, highest); MASKED where not every row sees all of them.

    `highest` is each row's largest score so far, in units of log 2; `total` and `sums` are relative to it.
    """
    d = tl.arange(0, BLOCK_KEY)
    e = tl.arange(0, BLOCK_VALUE)
    for first in range(start, stop, BLOCK_TOKENS):
        token = first + tl.arange(0, BLOCK_TOKENS)
        exists = token < stop
        page = tl.load(pages + token // PAGE, mask=exists, other=0).to(tl.int64)
        key = keys + (page * key_page + (token % PAGE) * key_token)[:, None] + d[None, :]
        k = tl.load(key, mask=exists[:, None] & (d < KEY_DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if softcap is not None:
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
        scores *= _LOG2_E
        if MASKED:
            visible = exists[None, :] & (token[None, :] <= position[:, None])
            if window is not None:
                visible &= token[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, _NEVER)
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps weights of 0, not NaN.
        shift = tl.where(new_highest == _NEVER, 0.0, new_highest)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights, axis=1)
        value = values + (page * value_page + (token % PAGE) * value_token)[:, None] + e[None, :]
        v = tl.load(value, mask=exists[:, None] & (e < VALUE_DIM)[None, :], other=0.0)
        sums = tl.dot(weights.to(v.dtype), v, sums * decay[:, None], input_precision="ieee")
        highest = new_highest
    return sums, total, highest

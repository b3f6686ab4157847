"""Semantics: logits[rows[m], t] = -inf where bit t % 32 of words[m, t // 32] is 0, or where words[m] ends before t."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux_kernels.cuda.launch import Launch

BLOCK = 4096
_NEVER = tl.constexpr(float("-inf"))


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Remove tokens from rows of `logits`, in place: arguments as for the public operator, on a GPU."""
    if len(rows):
        prepare_forbid(logits, rows, words).run()


def prepare_forbid(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> Launch:
    """The launch that changes `logits`: a program for each row and block of tokens; allowed tokens are not touched."""
    assert logits.stride(1) == 1, "rows of logits are contiguous"
    assert words.is_contiguous(), "words are contiguous"
    arguments = {
        "logits": logits,
        "rows": rows,
        "words": words,
        "logits_stride": logits.stride(0),
        "vocab": logits.shape[1],
        "num_words": words.shape[1],
        "BLOCK": BLOCK,
    }
    return Launch(_forbid, (len(rows), triton.cdiv(logits.shape[1], BLOCK)), arguments, num_warps=4, num_stages=1)


@triton.jit
def _forbid(
    logits: tl.tensor, rows: tl.tensor, words: tl.tensor, logits_stride: tl.tensor, vocab: tl.tensor,
    num_words: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row by one block of tokens a program."""
    number = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = token // 32
    own = tl.load(words + number * num_words + word, mask=word < num_words, other=0)
    is_allowed = (own >> (token % 32)) & 1
    row = tl.load(rows + number)
    never = tl.full((BLOCK,), _NEVER, dtype=tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * logits_stride + token, never, mask=(token < vocab) & (is_allowed == 0))

"""Semantics: logits[rows[m], t] = -inf where bit t % 32 of words[m, t // 32] is 0, or where words[m] ends before t."""

from __future__ import annotations

import torch

from loramux_kernels.device import runs_triton

WORD_BITS = 32


def forbid_tokens(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """Remove tokens from rows of `logits` `[S, vocab]`, any float dtype, in place.

    `rows` int64[M], no row twice; `words` int32[M, W], contiguous.
    """
    if runs_triton(logits):
        from loramux_kernels.cuda import token_mask as triton_token_mask

        triton_token_mask.forbid_tokens(logits, rows, words)
    else:
        forbid_tokens_reference(logits, rows, words)


def forbid_tokens_reference(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """`forbid_tokens` in torch, on any device."""
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    vocab = logits.shape[1]
    for row, own in zip(rows.tolist(), words, strict=True):
        allowed = (own[:, None] >> bits & 1).bool().flatten()[:vocab]
        logits[row, : len(allowed)].masked_fill_(~allowed, float("-inf"))
        logits[row, len(allowed) :] = float("-inf")

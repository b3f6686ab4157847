"""Masks of allowed tokens on the device, against the torch reference."""

from __future__ import annotations

import pytest
import torch

from loramux_kernels.sampling import forbid_tokens, forbid_tokens_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "words"), [(97, 4), (97, 2), (5000, 157), (4096, 200)])
def test_forbid_tokens_changes_the_named_rows_as_the_reference_does(dtype, vocab, words, device) -> None:
    generator = torch.Generator().manual_seed(vocab + words)
    logits = torch.randn(5, vocab, generator=generator).to(dtype).to(device)
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=generator).to(torch.int32).to(device)
    rows = torch.tensor([4, 0, 2], device=device)
    wanted, before = logits.clone(), logits.clone()
    forbid_tokens_reference(wanted, rows, masks)
    forbid_tokens(logits, rows, masks)
    assert torch.equal(logits, wanted)
    assert torch.equal(logits[[1, 3]], before[[1, 3]])
    assert bool(logits[4].isinf().any())

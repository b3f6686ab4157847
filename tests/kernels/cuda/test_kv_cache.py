"""write_kv as a Triton kernel: each token's heads where slot_mapping says, and nothing else touched."""

from __future__ import annotations

import pytest
import torch
from interpreted import far_memory

from loramux_kernels.cuda.paged_attention import write_kv
from loramux_kernels.tables import KvLayer

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_stores_every_token_in_its_slot(device, dtype):
    tokens, heads, block_size = 30, 3, 5
    pool = torch.full((80, heads, block_size, 24 + 7), float("nan"), dtype=dtype, device=device)
    key = torch.randn(heads, tokens, 24, device=device).to(dtype).transpose(0, 1)
    value = torch.randn(tokens, heads, 7, device=device).to(dtype)
    slots = torch.randperm(80 * block_size, device=device)[:tokens]
    slots[[4, 29]] = -1
    write_kv(key, value, KvLayer(pool[..., :24], pool[..., 24:]), slots)
    by_slot = pool.transpose(1, 2).flatten(0, 1)
    stored = slots >= 0
    assert torch.equal(by_slot[slots[stored]], torch.cat((key, value), -1)[stored])
    rest = torch.ones(80 * block_size, dtype=torch.bool)
    rest[slots[stored].cpu()] = False
    assert by_slot.cpu()[rest].isnan().all(), "padding rows are stored nowhere"


def test_write_kv_of_no_tokens_launches_nothing(device):
    pool = torch.zeros(2, 1, 4, 16, device=device)
    empty = torch.zeros(0, 1, 8, device=device)
    write_kv(empty, empty, KvLayer(pool[..., :8], pool[..., 8:]), torch.zeros(0, dtype=torch.int64, device=device))
    assert not pool.any()


def test_write_kv_takes_slots_beyond_32_bits(device):
    block_size, width, page = 16, 64, 2**20 + 1
    pool = far_memory((page + 1) * 2 * block_size * width, torch.float16, device)
    pages = pool.view(page + 1, 2, 1, block_size, width)
    key, value = torch.randn(2, 1, 1, width, device=device).to(torch.float16)
    slot = torch.tensor([page * block_size + 3], device=device)
    write_kv(key, value, KvLayer(pages[:, 0], pages[:, 1]), slot)
    assert torch.equal(pages[page, 0, 0, 3], key[0, 0])
    assert torch.equal(pages[page, 1, 0, 3], value[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_stores_no_values_that_are_in_their_keys(device, dtype):
    key = torch.full((2, 1, 4, 20), float("nan"), dtype=dtype, device=device)
    layer = KvLayer(key, key[..., :12], has_values_in_keys=True)
    rows = torch.randn(3, 1, 20, device=device).to(dtype)
    write_kv(rows, torch.zeros(3, 1, 12, dtype=dtype, device=device), layer, torch.tensor([1, 6, -1], device=device))
    assert torch.equal(key.flatten(0, 2)[[1, 6]], rows[:2, 0])
    assert key.isnan().sum() == 6 * 20

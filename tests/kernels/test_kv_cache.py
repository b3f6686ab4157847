"""write_kv puts each token's heads where slot_mapping says, and touches nothing else."""

from __future__ import annotations

import pytest
import torch

from loramux_kernels.paged_attention import write_kv, write_kv_reference
from loramux_kernels.tables import KvLayer

pytestmark = pytest.mark.usefixtures("native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("write", [write_kv, write_kv_reference])
def test_write_kv_stores_every_token_in_its_slot(dtype, write):
    tokens, heads, block_size = 300, 3, 5
    pool = torch.full((80, heads, block_size, 24 + 7), float("nan"), dtype=dtype)
    layer = KvLayer(pool[..., :24], pool[..., 24:])
    key = torch.randn(heads, tokens, 24).to(dtype).transpose(0, 1)
    value = torch.randn(tokens, heads, 7).to(dtype)
    slots = torch.randperm(80 * block_size)[:tokens]
    write(key, value, layer, slots)
    by_slot = pool.transpose(1, 2).flatten(0, 1)
    assert torch.equal(by_slot[slots], torch.cat((key, value), -1))
    rest = torch.ones(80 * block_size, dtype=torch.bool)
    rest[slots] = False
    assert by_slot[rest].isnan().all()


def test_write_kv_takes_slots_beyond_32_bits():
    block_size, width, page = 16, 64, 2**21 + 1
    try:
        pool = torch.empty((page + 1) * 2 * block_size * width, dtype=torch.bfloat16)  # untouched memory is not held
    except RuntimeError:
        pytest.skip("no 8 GiB of address space")
    pages = pool.view(page + 1, 2, 1, block_size, width)
    layer = KvLayer(pages[:, 0], pages[:, 1])
    key, value = torch.randn(2, 1, 1, width).to(torch.bfloat16)
    write_kv(key, value, layer, torch.tensor([page * block_size + 3]))
    assert torch.equal(layer.key[page, 0, 3], key[0, 0])
    assert torch.equal(layer.value[page, 0, 3], value[0, 0])

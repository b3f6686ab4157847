"""The first launches of a step, against their torch references."""

from __future__ import annotations

import torch

from loramux_kernels.cuda.step_inputs import BLOCK, prepare_insert_tokens, prepare_write_pages
from loramux_kernels.step_inputs import insert_tokens_reference, write_pages_reference

TOKEN, NOWHERE = 11, 10**9


def test_pages_are_written_as_far_as_the_number_says(device):
    """Places after the number are those of earlier steps."""
    for count in (0, 1, BLOCK, BLOCK + 5):
        places = torch.randperm(4 * BLOCK)[: 2 * BLOCK]
        pages, number = torch.arange(1, 2 * BLOCK + 1).int(), torch.tensor([count]).int()
        places[count:] = NOWHERE
        tables = [torch.zeros(4, BLOCK, dtype=torch.int32, device=device) for _ in range(2)]
        prepare_write_pages(tables[0], *(part.to(device) for part in (places, pages, number))).run()
        write_pages_reference(tables[1].cpu(), places, pages, number)
        wanted = torch.zeros(4, BLOCK, dtype=torch.int32)
        write_pages_reference(wanted, places, pages, number)
        assert torch.equal(tables[0].cpu(), wanted)
        assert wanted.count_nonzero() == count


def test_tokens_are_inserted_and_counted_as_far_as_the_number_says(device):
    """One is counted, one has no counter, one is no token, and one is of an earlier step."""
    pending = torch.tensor([[4, 1, 0, NOWHERE], [2, 0, 1, NOWHERE], [1, -1, 0, NOWHERE]])
    sampled, number = torch.tensor([7, -2, TOKEN]), torch.tensor([3]).int()
    found = []
    for run in (lambda *args: prepare_insert_tokens(*args).run(), insert_tokens_reference):
        input_ids, counts = torch.full((6,), 5), torch.zeros(2, 20, dtype=torch.int32)
        input_ids, counts = input_ids.to(device), counts.to(device)
        for _ in range(2):
            run(input_ids, counts, *(part.to(device) for part in (sampled, pending, number)))
        found.append((input_ids.tolist(), counts.nonzero().tolist(), int(counts[1, TOKEN])))
    assert found == [([0, 7, 5, 5, TOKEN, 5], [[1, TOKEN]], 2)] * 2

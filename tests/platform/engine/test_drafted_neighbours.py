"""Drafts next to requests of every other kind: whatever a step holds, each answer is the one without drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_zoo import Asked, to_request
from drafted_neighbours import (
    TOKENS,
    MixedZoo,
    answers_of,
    check_drafts_change_nothing,
    drafts_in_images,
    mixed_requests,
)
from drafting_heads import Drafted, always_drafts, mtp_engine
from image_prompts import Pictured, picture
from llguidance import LLMatcher
from msgspec.structs import replace
from preempting import preempting

from loramux.engine.messages import Constraint


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> MixedZoo:
    return MixedZoo(tmp_path_factory.mktemp("mixed"), max_position_embeddings=512)


@pytest.mark.parametrize(
    ("source", "seed", "sizes"),
    [
        ("mtp", 0, {"max_num_batched_tokens": 64}),
        ("ngram", 1, {"max_num_batched_tokens": 21, "swap_bytes": 0}),
        ("mtp", 2, {"max_num_batched_tokens": 33, "swap_bytes": 1 << 22}),
        ("ngram", 3, {"max_num_batched_tokens": 40, "prefix_cache": False, "block_size": 37}),
    ],
)
def test_drafts_next_to_every_kind_of_request_change_no_answer_and_no_end(
    zoo: MixedZoo, source: str, seed: int, sizes: dict[str, Any]
) -> None:
    """Images, grammars, tools, seeds, penalties, log probabilities, stop tokens, several choices, and adapters with
    magnitudes, invocations and added tokens, preempted or swapped while drafts are verified."""
    requests = mixed_requests(zoo, seed, count=12)
    settings: dict[str, Any] = {"max_num_seqs": 12, "pool_bytes": 16 << 20}
    check_drafts_change_nothing(zoo, source, seed, requests, every=7, **settings | sizes)


def test_copies_of_an_adapters_own_tokens_as_drafts_end_no_constrained_answer(zoo: MixedZoo) -> None:
    """A grammar does not know tokens that an adapter has added, and prompt lookup drafts them."""
    prompt = (*b"ab", TOKENS, TOKENS + 1, *b"ba", TOKENS + 2, TOKENS)
    constraint = Constraint(grammar=LLMatcher.grammar_from_regex("(ab){3}"), field="f")
    request = replace(to_request(zoo, Asked("r", "added", prompt, 9)), constraint=constraint)
    alone = answers_of(zoo.engine(), [request], [0])
    assert bytes(alone["r"].tokens[:-1]) == b"ababab"
    engine, drafted = zoo.engine(speculation="ngram", max_draft_tokens=4), []
    always_drafts(engine, seed=1)
    guess = engine.scheduler.speculation.guess
    engine.scheduler.speculation.guess = lambda own, count: drafted.append(guess(own, count)) or drafted[-1]
    assert answers_of(engine, [request], [0]) == alone
    assert any(token >= TOKENS for drafts in drafted for token in drafts)


def test_head_in_chunks_of_texts_with_images_drafts_as_the_reference_does(zoo: MixedZoo) -> None:
    """Rows of images are the embeddings of their pairs, also if a chunk or a found prefix ends among them."""
    first, second = picture(1, 40, 24), picture(2, 16, 40)
    asked = {
        name: Pictured(name, adapter, parts, 9)
        for name, adapter, parts in (
            ("alone", None, ((5, 6, 7), first, (8,))),
            ("two", "plain", ((5, 6), first, (9, 10, 11), second, (12, 13))),
            ("again", None, ((5, 6, 7), first, (8, 9, 10, 11))),
            ("at its end", "plain", (tuple(range(10, 29)), second)),
        )
    }
    requests = [zoo.images.request(one) for one in asked.values()]
    alone = answers_of(zoo.engine(max_num_batched_tokens=13), requests, [0, 1, 9, 9])
    engine = preempting(mtp_engine(zoo, max_num_batched_tokens=13), every=9)
    drafted = Drafted(engine)
    assert answers_of(engine, requests, [0, 1, 9, 9]) == alone
    assert engine.stats().preemptions > 0
    assert {sequence.id for sequence, *_ in drafted.seen} == asked.keys()
    for sequence, length, drafts, logits in drafted.seen:
        expected = drafts_in_images(zoo, asked[sequence.id], sequence.token_ids[:length], len(drafts))
        torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
        assert drafts == expected.argmax(-1).tolist()

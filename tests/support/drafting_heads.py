"""Engines whose head for multi-token prediction drafts in every step, and their drafts next to the reference's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Items
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import torch
from adapter_zoo import Zoo
from multi_token_reference import ReferenceHead, base_of, states_of

from loramux.engine.engine import Engine
from loramux.engine.scheduling.sequence import PENDING, Sequence


def mtp_engine(zoo: Zoo, seed: int = 0, **settings: Any) -> Engine:
    """An engine whose head drafts in every step, as many tokens as a seed says."""
    engine = zoo.engine(**{"speculation": "mtp", "max_draft_tokens": 4} | settings)
    always_drafts(engine, seed)
    return engine


def always_drafts(engine: Engine, seed: int = 0) -> None:
    """Let a head draft in every step, as many tokens as a seed says."""
    rng, speculation = random.Random(seed), cast(Any, engine.scheduler.speculation)
    speculation.times = SimpleNamespace(
        is_known=True, is_measured=lambda rows: True, ahead_seconds=0.0, observe=lambda *_: None
    )
    speculation.count_paying = lambda rate, rows, expected, most, ahead_seconds=0.0: rng.randint(0, most)
    speculation.longest_paying = lambda asked, rows, expected: max(count for _, count in asked)


def draft_what_follows(engine: Engine, answers: Mapping[str, Items[int]]) -> None:
    """Replace every second draft of a head by the tokens that follow in the request's answer, as far as there are."""
    head, numbers = cast(Any, engine.scheduler.speculation.head), count()
    draft = head.draft

    def corrected(asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        found = draft(asked)
        for (sequence, _), drafts in zip(asked, found, strict=True):
            if next(numbers) % 2:
                right = answers[sequence.id][sequence.num_output_tokens :][: len(drafts)]
                drafts[: len(right)] = right
        return found

    head.draft = corrected


class Drafted:
    """Remembers what a head drafts, with its logits."""

    def __init__(self, engine: Engine) -> None:
        self.seen: list[tuple[Sequence, int, list[int], torch.Tensor]] = []
        """Each sequence, the number of its tokens, its drafts and their logits."""
        self.num_pending = 0
        """Drafts after a token that the host did not know."""
        head = cast(Any, engine.scheduler.speculation.head)
        self._draft, output = head.draft, head.head.lm_head or head._forward.model.get_output_embeddings()
        self._rows: list[torch.Tensor] = []
        output.register_forward_hook(lambda _module, _inputs, logits: self._rows.append(logits.clone()))
        head.draft = self.draft

    def draft(self, asked: list[tuple[Sequence, int]]) -> list[list[int]]:
        self._rows.clear()
        drafts = self._draft(asked)
        order = sorted(range(len(asked)), key=lambda i: -asked[i][1])
        for place, i in enumerate(order):
            sequence, count = asked[i]
            logits = torch.stack([self._rows[step][place] for step in range(count)])
            self.seen.append((sequence, len(sequence.token_ids), drafts[i], logits))
            self.num_pending += sequence.token_ids[-1] == PENDING
        return drafts


def check_drafts(zoo: Zoo, drafted: Drafted) -> None:
    """Compare every draft with the reference, on hidden states of transformers and PEFT."""
    model, base = zoo._reference, base_of(zoo.base)
    reference = ReferenceHead.read(base, zoo.base)
    assert drafted.seen
    for sequence, length, drafts, logits in drafted.seen:
        token_ids = sequence.token_ids[:length]
        if sequence.digest is None:
            hidden = states_of(base, token_ids)
        else:
            assert model is not None
            model.set_adapter(sequence.digest.removeprefix("sha256:"))
            hidden = states_of(model, token_ids)
        expected, expected_logits = reference.drafts(token_ids, hidden, len(drafts))
        torch.testing.assert_close(logits.cpu().float(), expected_logits, atol=2e-3, rtol=1e-3)
        assert drafts == expected

"""Formats on trial: what is accepted can be followed, what is refused is refused by name, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from hostile_grammars import corpus
from scripted_engine import FACTS
from tiny_base import byte_tokenizer

from loramux.constraints.formats import AnswerFormat, Choice, JsonSchema, Regex
from loramux.constraints.grammars import TrialJob, compile_grammar
from loramux.engine.messages import Constraint
from loramux.serving import formats as module
from loramux.serving.errors import InvalidRequest
from loramux.serving.formats import GrammarTrials
from loramux.serving.tokenizer import Tokenizer

HOSTILE = corpus()
TOKENIZER = Tokenizer(byte_tokenizer())


def on_trial(act: Callable[[GrammarTrials], Awaitable[None]]) -> None:
    trials = GrammarTrials(TOKENIZER, FACTS)
    try:
        asyncio.run(act(trials))
    finally:
        trials.close()


def llguidance_tokenizer():
    from llguidance.hf import from_tokenizer

    return from_tokenizer(byte_tokenizer(), n_vocab=260, eos_token=[256])


def follow(constraint: Constraint, tokens: int) -> None:
    """Follow random allowed tokens, as an engine would; a limit that is met ends the answer, not the process."""
    matcher, chance = compile_grammar(llguidance_tokenizer(), constraint.grammar), np.random.default_rng(0)
    words = np.zeros(9, dtype=np.int32)
    assert not matcher.is_error()
    for _ in range(tokens):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if matcher.is_error() or not len(allowed) or not matcher.consume_token(int(chance.choice(allowed))):
            return


def check_hostile(formats: list[tuple[str, AnswerFormat]]) -> tuple[int, int]:
    """Return how many were accepted and how many refused."""
    accepted: list[str] = []
    refused: list[InvalidRequest] = []

    async def act(trials: GrammarTrials) -> None:
        for name, format in formats:
            try:
                constraint = await trials.constraint("t", TrialJob(format=format), "response_format")
            except InvalidRequest as error:
                refused.append(error)
            else:
                follow(constraint, 60)
                accepted.append(name)

    on_trial(act)
    assert {(error.field, error.code) for error in refused} <= {("response_format", "invalid_constraint")}
    assert all(error.message.startswith("'response_format' ") for error in refused)
    return len(accepted), len(refused)


def test_every_tenth_hostile_format_is_refused_by_name_or_followed() -> None:
    accepted, refused = check_hostile(HOSTILE[3::10])
    assert (accepted > 2, refused > 2) == (True, True)


def test_formats_that_end_the_process_or_run_for_minutes_are_refused() -> None:
    """A stack that overflows, a compilation without an end, and the one after them, which is served."""
    deadly = [one for one in HOSTILE if one[0] in ("grammar: alternatives of rules", "grammar: repeated rules")]
    assert check_hostile(deadly) == (0, 2)
    assert check_hostile([*deadly[:1], ("fine", Regex("a"))]) == (1, 1)


@pytest.mark.slow
def test_200_hostile_formats_are_refused_by_name_or_followed() -> None:
    assert len(HOSTILE) == 200
    accepted, refused = check_hostile(HOSTILE)
    assert accepted + refused == 200
    assert refused > 60


def test_a_format_is_tried_once_for_a_tenant_and_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEPT_OF_TENANT", 2)
    tried: list[bytes] = []

    async def act(trials: GrammarTrials) -> None:
        inner = trials._try
        trials._try = lambda job: tried.append(job) or inner(job)
        asked = [TrialJob(format=Regex(f"a{i}")) for i in range(3)]
        await asyncio.gather(*(trials.constraint("t", asked[0], "f") for _ in range(5)))
        assert len(tried) == 1
        await trials.constraint("other", asked[0], "f")
        assert len(tried) == 2
        await trials.constraint("t", asked[1], "f")
        await trials.constraint("t", asked[2], "f")
        await trials.constraint("t", asked[0], "f")
        assert len(tried) == 5

    on_trial(act)


def test_choice_of_thousands_of_texts_is_accepted() -> None:
    assert check_hostile([("many", Choice([f"choice {i}" for i in range(9000)]))]) == (1, 0)


def test_format_beyond_the_bytes_is_refused_before_it_is_tried() -> None:
    async def act(trials: GrammarTrials) -> None:
        trials._try = lambda job: pytest.fail("it was tried")
        with pytest.raises(InvalidRequest, match="at most 262144"):
            await trials.constraint("t", TrialJob(format=JsonSchema({"enum": ["x" * 300_000]})), "f")

    on_trial(act)

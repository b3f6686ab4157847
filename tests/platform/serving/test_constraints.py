"""Formats on trial: what is accepted can be followed, what is refused is refused by name, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from hostile_grammars import corpus, schemas
from scripted_engine import FACTS
from tiny_base import byte_tokenizer

from loramux.constraints.formats import AnswerFormat, Choice, JsonSchema, Regex
from loramux.constraints.grammars import ToolGrammar, TrialJob, compile_grammar
from loramux.constraints.tools import STYLES, Tool, ToolUse
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


def refused_tools(schemas: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """The schemas with which a tool that is not strict, next to another one, is refused."""
    refused: dict[str, str] = {}

    async def act(trials: GrammarTrials) -> None:
        for name, schema in (one for one in schemas if one[0] not in TOO_DEEP):
            tools = (Tool(name="f", parameters={"properties": {"e": schema}, "required": ["e"]}), Tool(name="g"))
            use = ToolGrammar(use=ToolUse(tools=tools), style=STYLES["hermes"], special={})
            try:
                constraint = await trials.constraint("t", TrialJob(tools=use), "tools")
            except InvalidRequest as error:
                refused[name] = error.message
            else:
                follow(constraint, 60)

    on_trial(act)
    return refused


TOO_DEEP = [name for name, _ in schemas() if name.startswith("nested objects 1")]
"""Schemas with more levels than a body may have, which the API refuses before a trial."""


TOO_LARGE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(4000)}}
"""A schema that ends the process of the trial."""


@pytest.mark.parametrize("style", ["hermes", "mistral_args", "pythonic", "qwen3_coder", "gemma4"])
def test_tool_that_ends_the_trial_takes_any_object_unless_it_is_strict(style: str) -> None:
    large = Tool(name="f", parameters={"properties": {"e": TOO_LARGE}, "required": ["e"]})

    def job(tool: Tool) -> TrialJob:
        return TrialJob(tools=ToolGrammar(use=ToolUse(tools=(tool,)), style=STYLES[style], special={}))

    async def act(trials: GrammarTrials) -> None:
        found = await trials.constraint("t", job(large), "tools")
        assert found.grammar == (await trials.constraint("t", job(large.loosened()), "tools")).grammar
        with pytest.raises(InvalidRequest, match="cannot be enforced"):
            await trials.constraint("t", job(msgspec.structs.replace(large, strict=True)), "tools")

    on_trial(act)


def test_every_fifth_hostile_schema_of_a_tool_refuses_no_request() -> None:
    assert refused_tools(list(schemas())[::5]) == {}


@pytest.mark.slow
def test_hostile_schema_of_a_tool_refuses_no_request() -> None:
    assert refused_tools(schemas()) == {}


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

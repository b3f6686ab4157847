from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_base import byte_tokenizer
from tiny_tokenizers import FAMILIES
from transformers import PreTrainedTokenizerFast

from loramux.engine.messages import EngineFault, TokenEvent, TopLogprob
from loramux.serving.errors import GenerationFailed, InvalidRequest, OverCapacity
from loramux.serving.messages import Delta
from loramux.serving.output import OutputProcessor
from loramux.serving.tokenizer import StopAutomaton, Tokenizer

BYTES = Tokenizer(byte_tokenizer())
EOS = 256


def events(ids: list[int], finish: str = "length") -> list[TokenEvent]:
    return [
        TokenEvent(
            request_id="r",
            token_id=token,
            logprob=-float(i),
            top_logprobs=[TopLogprob(token, -float(i)), TopLogprob(65, -9.0)],
            cached_tokens=3 if i == 0 else 0,
            finish_reason=finish if i == len(ids) - 1 else None,
        )
        for i, token in enumerate(ids)
    ]


def run(output: OutputProcessor, arriving: list[TokenEvent]) -> list[Delta]:
    deltas = []
    for event in arriving:
        deltas.append(output.push(event))
        if output.finish_reason is not None:
            break
    return deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
    stops=st.lists(st.text("ab é€", min_size=1, max_size=4), max_size=3),
)
def test_logprobs_match_the_shown_text(text: str, stops: list[str]) -> None:
    ids = list(text.encode())
    output = OutputProcessor(0, BYTES, [], StopAutomaton(tuple(stops)), 0)
    deltas = run(output, events(ids))
    shown = text_of(deltas)
    logprobs = [one for delta in deltas for one in delta.logprobs]
    assert b"".join(one.token.bytes for one in logprobs).decode() == shown
    assert [one.logprob for one in logprobs] == [-float(i) for i in range(len(logprobs))]
    assert all(
        shown[one.offset :].encode().startswith(one.token.bytes[:1]) for one in logprobs if len(one.token.text) == 1
    )
    assert output.finish_reason == ("stop" if any(stop in text for stop in stops) else "length")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_read_through_transformers(name: str) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=FAMILIES[name]()))
    ids = tokenizer._tokenizer.encode("Hello naïve 日本 🙂 ok", add_special_tokens=False)
    assert (
        text_of(run(OutputProcessor(0, tokenizer, [], StopAutomaton(()), 0), events(ids))) == "Hello naïve 日本 🙂 ok"
    )


def test_end_token_is_counted_and_not_shown() -> None:
    output = OutputProcessor(0, BYTES, [], StopAutomaton(()), 0)
    deltas = run(output, events([*b"hi", 33], finish="stop"))
    assert text_of(deltas) == "hi"
    assert [token for delta in deltas for token in delta.token_ids] == [*b"hi", 33]
    assert (output.num_tokens, output.finish_reason) == (3, "stop")


def test_tokens_are_counted_up_to_the_end_of_a_stop_string() -> None:
    output = OutputProcessor(0, BYTES, [], StopAutomaton(("END",)), 0)
    assert text_of(run(output, events(list(b"ab END of it")))) == "ab "
    assert (output.num_tokens, output.finish_reason) == (6, "stop")


def test_partial_stop_string_is_shown_at_the_end() -> None:
    output = OutputProcessor(0, BYTES, [], StopAutomaton(("END",)), 0)
    assert text_of(run(output, events(list(b"ab EN")))) == "ab EN"
    assert output.finish_reason == "length"


def test_stop_string_is_ignored_before_min_tokens() -> None:
    output = OutputProcessor(0, BYTES, [], StopAutomaton(("x",)), 3)
    assert text_of(run(output, events(list(b"axbcxd")))) == "axbc"
    assert output.num_tokens == 5


def test_half_character_at_the_end_is_shown_as_replacement() -> None:
    output = OutputProcessor(0, BYTES, [], StopAutomaton(()), 0)
    deltas = run(output, events(list("a€".encode())[:-1]))
    assert [delta.text for delta in deltas] == ["a", "", "�"]
    assert [one.token.text for delta in deltas for one in delta.logprobs] == ["a", "bytes:\\xe2", "bytes:\\x82"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("context_length_exceeded", InvalidRequest),
        ("engine_overloaded", OverCapacity),
        ("deadline_exceeded", OverCapacity),
        ("adapter_failed", GenerationFailed),
        ("internal_error", GenerationFailed),
    ],
)
def test_faults_are_raised_by_kind(code: str, kind: type[Exception]) -> None:
    event = TokenEvent(request_id="r", finish_reason="error", fault=EngineFault(code, "why"))
    with pytest.raises(kind, match="why"):
        OutputProcessor(0, BYTES, [], StopAutomaton(()), 0).push(event)

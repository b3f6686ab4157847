"""The mask of learned tokens, compared with the text, in templates that render turns in different ways."""

from __future__ import annotations

import pytest
from tiny_base import CHAT_TEMPLATE, byte_tokenizer

from loramux.serving.messages import ChatOptions, Message
from loramux.serving.tokenizer import Tokenizer
from loramux.training.encoding import Encoder, Sequence, Unlearnable
from loramux.training.examples import Example, Turn
from loramux_demo.assets import LOOKUP, base_folder

EOS = 256
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>{{ m['reasoning_content'] or '' }}</think>{% endif %}"
    "{{ m['content'] }}<|eos|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template as Qwen3's, in which only the last answer shows its thought."""
TALK = (
    Turn("system", "Be brief."),
    Turn("user", "Hi?"),
    Turn("assistant", "Hello.", {}, is_learned=True),
    Turn("user", "Grüße 日本?"),
    Turn("assistant", "Ja – 🙂 <b>", {}, is_learned=True),
)


def encoder(template: str, context: int = 1024) -> Encoder:
    return Encoder(Tokenizer(byte_tokenizer(template)), {EOS}, EOS, context)


def learned_texts(encoder: Encoder, sequences: list[Sequence]) -> list[list[str]]:
    """The runs of learned tokens of each sequence, as text with special tokens."""
    return [_runs(encoder.tokenizer, one) for one in sequences]


def _runs(tokenizer: Tokenizer, sequence: Sequence) -> list[str]:
    runs: list[list[int]] = []
    before = False
    for token, learned in zip(sequence.token_ids, sequence.learned, strict=True):
        if learned:
            if not before:
                runs.append([])
            runs[-1].append(token)
        before = learned
    return [tokenizer.transformers_tokenizer.decode(run) for run in runs]


def test_mask_of_a_template_with_ends_is_what_the_assistant_wrote_in_one_sequence() -> None:
    chatml = encoder(CHATML)
    sequences = chatml.sequences(Example(turns=TALK))
    assert learned_texts(chatml, sequences) == [["Hello.<|eos|>", "Ja – 🙂 <b><|eos|>"]]
    whole = chatml.tokenizer.render(tuple(turn.message for turn in TALK), ChatOptions(ending="message"))
    assert chatml.tokenizer.transformers_tokenizer.decode(list(sequences[0].token_ids)) == whole.removesuffix("\n")


def test_mask_of_a_template_that_forgets_thoughts_is_one_sequence_for_each_answer() -> None:
    forgetful = encoder(FORGETS_THOUGHTS)
    thinking = tuple(
        Turn(turn.role, turn.content, {"reasoning_content": "hm"} if turn.is_learned else {}, turn.is_learned)
        for turn in TALK
    )
    sequences = forgetful.sequences(Example(turns=thinking))
    assert learned_texts(forgetful, sequences) == [
        ["<think>hm</think>Hello.<|eos|>"],
        ["<think>hm</think>Ja – 🙂 <b><|eos|>"],
    ]
    assert "<think>" not in forgetful.tokenizer.transformers_tokenizer.decode(
        [token for token, learned in zip(sequences[1].token_ids, sequences[1].learned, strict=True) if not learned]
    )


def test_mask_of_a_template_without_an_end_token_appends_one_to_each_answer() -> None:
    plain = encoder(CHAT_TEMPLATE)
    assert learned_texts(plain, plain.sequences(Example(turns=TALK))) == [
        [" Hello.\n<|eos|>"],
        [" Ja – 🙂 <b>\n<|eos|>"],
    ]


def test_each_learned_answer_follows_exactly_the_prompt_that_serving_sends() -> None:
    for template in (CHATML, FORGETS_THOUGHTS, CHAT_TEMPLATE):
        one = encoder(template)
        found = one.sequences(Example(turns=TALK))
        for number, turn in enumerate(TALK):
            if turn.is_learned:
                before = tuple(earlier.message for earlier in TALK[:number])
                text = one.tokenizer.render(before, ChatOptions())
                prompt = tuple(one.tokenizer.encode_now(text, 1024, add_special_tokens=False))
                starts = [
                    sequence
                    for sequence in found
                    if sequence.token_ids[: len(prompt)] == prompt and sequence.learned[len(prompt)]
                ]
                assert starts, (template, number)


def test_weight_zero_leaves_an_answer_out_of_the_mask() -> None:
    chatml = encoder(CHATML)
    turns = tuple(Turn(turn.role, turn.content, {}, turn.content == "Hello.") for turn in TALK)
    assert learned_texts(chatml, chatml.sequences(Example(turns=turns))) == [["Hello.<|eos|>"]]


def test_a_tool_call_is_learned_and_its_result_is_not() -> None:
    tokenizer = Tokenizer.load(base_folder())
    assert tokenizer.end_id is not None
    demo = Encoder(tokenizer, {tokenizer.end_id}, tokenizer.end_id, 512)
    call = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": {"person": "Halkodel"}}}
    turns = (
        Turn("user", "What does Halkodel do?"),
        Turn("assistant", "", {"tool_calls": [call]}, is_learned=True),
        Turn("tool", "tailor", {"tool_call_id": "c1"}),
        Turn("assistant", "A tailor.", {}, is_learned=True),
    )
    (sequence,) = demo.sequences(Example(turns=turns, variables={"tools": [LOOKUP]}))
    end = tokenizer.transformers_tokenizer.eos_token
    first, second = _runs(tokenizer, sequence)
    assert first == '<tool_call>{"name": "lookup", "arguments": {"person": "Halkodel"}}</tool_call>' + end
    assert second == f"A tailor.{end}"


def test_an_example_longer_than_the_context_is_refused_and_not_cut() -> None:
    with pytest.raises(Unlearnable, match="more than the 40 tokens of the context"):
        encoder(CHATML, context=40).sequences(Example(turns=TALK))


def test_a_template_that_begins_an_answer_in_two_ways_is_refused() -> None:
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}(assistant){% endif %}"
    )
    with pytest.raises(Unlearnable, match=r"messages\[2\]: the chat template begins"):
        encoder(template).sequences(Example(turns=TALK))


def test_an_example_that_begins_with_the_answer_is_refused() -> None:
    with pytest.raises(Unlearnable, match="begin with the user's"):
        encoder(CHATML).sequences(Example(turns=(Turn("assistant", "Hi.", {}, is_learned=True),)))


def test_a_preference_has_one_prompt_and_two_answers() -> None:
    chatml = encoder(CHATML)
    rejected = (Turn("assistant", "No.", {}, is_learned=True),)
    pair = chatml.pair(Example(turns=TALK[:3], rejected=rejected, num_shared=2))
    decode = chatml.tokenizer.transformers_tokenizer.decode
    assert decode(list(pair.prompt)).endswith("Hi?<|eos|>\n<|im_start|>assistant\n")
    assert [decode(list(one)) for one in (pair.preferred, pair.rejected)] == ["Hello.<|eos|>", "No.<|eos|>"]


def test_messages_of_turns_are_those_of_serving() -> None:
    assert TALK[1].message == Message("user", "Hi?")

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from loramux_demo.assets import LOOKUP, base_folder, call_text, completion_prompt
from loramux_demo.train.models import BOS, EOS, byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(base_folder())


@given(text=st.text())
def test_tokenizer_round_trips_any_text(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids == list(text.encode())
    assert tokenizer.decode(token_ids) == text


def test_tokenizer_has_a_token_per_byte(tokenizer):
    assert [tokenizer.encode(bytes([byte]).decode(), add_special_tokens=False) for byte in range(128)] == [
        [byte] for byte in range(128)
    ]
    assert tokenizer.decode([0xE2, 0x82]) == "\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode([0xE2, 0x82, 0xAC]) == "€"


def test_tokenizer_prepends_bos_and_separates_special_tokens(tokenizer):
    assert tokenizer.encode("a") == [tokenizer.bos_token_id, ord("a")]
    assert min(tokenizer.all_special_ids) == 256
    assert tokenizer.decode([tokenizer.bos_token_id, ord("a"), tokenizer.eos_token_id], skip_special_tokens=True) == "a"


def test_tokenizer_asset_equals_the_scripts_output(tokenizer):
    made = byte_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.chat_template == made.chat_template
    assert tokenizer.special_tokens_map == made.special_tokens_map


def rendered(tokenizer, *messages):
    chat = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def test_chat_template_of_one_question_equals_completion_prompt(tokenizer):
    question = "Where does Zoë live?"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    assert chat == tokenizer.encode(completion_prompt(question))


def test_chat_template_renders_system_prompt_and_two_questions(tokenizer):
    text = rendered(tokenizer, ("system", "Be brief."), ("user", "One?"), ("assistant", "Yes."), ("user", "Two?"))
    assert text == f"{BOS}Be brief.\nQ: One?\nA: Yes.{EOS}{BOS}Q: Two?\nA: "


def test_chat_template_keeps_the_prefix_of_earlier_turns(tokenizer):
    assert rendered(tokenizer, ("user", "One?"), ("user", "Two?")) == f"{BOS}Q: One?\nQ: Two?\nA: "


def test_chat_template_renders_tools_calls_and_results(tokenizer):
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"person": "Mira", "fact": "pet"}}}
    chat = [
        {"role": "user", "content": "What pet does Mira have?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "fox"},
    ]
    text = tokenizer.apply_chat_template(chat, tools=[LOOKUP], add_generation_prompt=True, tokenize=False)
    written = call_text("lookup", '{"person": "Mira", "fact": "pet"}')
    assert text == f"{BOS}T: lookup(person, fact)\nQ: What pet does Mira have?\nA: {written}{EOS}R: fox\nA: "

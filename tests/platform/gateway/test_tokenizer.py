from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tiny_base import byte_tokenizer
from tiny_tokenizers import FAMILIES
from transformers import PreTrainedTokenizerFast

from loramux.gateway import InvalidRequest, Message
from loramux.gateway.tokenizer import Tokenizer
from loramux.settings import SettingsError


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", ["Hello world", "é", "日本 🙂", "a b  c"])
def test_tokens_spell_the_bytes_of_the_text(name: str, text: str) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=FAMILIES[name]()))
    ids = tokenizer._tokenizer.encode(text, add_special_tokens=False)
    spelled = b"".join(tokenizer.token(token_id).bytes for token_id in ids).decode()
    assert spelled.removeprefix(" ") == text


def test_a_special_token_spells_its_name_and_an_unknown_one_nothing() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert tokenizer.token(256).text == "<|eos|>"
    assert tokenizer.token(99_999).bytes == b""


def test_texts_get_the_models_special_tokens_and_conversations_those_of_the_template() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    assert asyncio.run(tokenizer.encode("hi")) == [257, *b"hi"]
    chat = asyncio.run(tokenizer.encode_chat((Message("system", "be kind"), Message("user", "hi"))))
    assert bytes(chat) == b"system: be kind\nuser: hi\nassistant:"


def test_long_texts_are_the_same_from_a_thread() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    text = "long é " * 2000
    assert asyncio.run(tokenizer.encode(text)) == [257, *text.encode()]
    assert bytes(asyncio.run(tokenizer.encode_chat((Message("user", text),)))) == f"user: {text}\nassistant:".encode()


def test_without_a_template_the_refusal_names_the_way_out() -> None:
    tokenizer = Tokenizer(byte_tokenizer(chat_template=None))
    with pytest.raises(InvalidRequest, match="/v1/completions") as refusal:
        asyncio.run(tokenizer.encode_chat((Message("user", "hi"),)))
    assert refusal.value.param == "messages"


def test_what_the_template_refuses_is_refused_in_its_words() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    with pytest.raises(InvalidRequest, match="a system message comes first"):
        asyncio.run(tokenizer.encode_chat((Message("user", "hi"), Message("system", "late"))))


def test_a_folder_without_a_tokenizer_is_refused_by_the_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.path"):
        Tokenizer.load(tmp_path)

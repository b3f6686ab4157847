from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
import transformers
from encoder_zoo import word_tokenizer
from tiny_base import byte_tokenizer
from tiny_tokenizers import FAMILIES
from transformers import PreTrainedTokenizerFast

from loramux.common.settings.file import SettingsError
from loramux.common.tokenizer_file import SAMPLES
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Message, TextPair
from loramux.serving.tokenizer import Tokenizer


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
    assert asyncio.run(tokenizer.encode("hi", 256)) == [257, *b"hi"]
    chat = asyncio.run(tokenizer.encode_chat((Message("system", "be kind"), Message("user", "hi")), 256))
    assert bytes(chat.token_ids) == b"system: be kind\nuser: hi\nassistant:"


def test_long_texts_are_the_same_from_a_thread() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    text = "long é " * 2000
    assert asyncio.run(tokenizer.encode(text, 1 << 20)) == [257, *text.encode()]
    assert (
        bytes(asyncio.run(tokenizer.encode_chat((Message("user", text),), 1 << 20)).token_ids)
        == f"user: {text}\nassistant:".encode()
    )


def test_without_a_template_the_refusal_names_the_way_out() -> None:
    tokenizer = Tokenizer(byte_tokenizer(chat_template=None))
    with pytest.raises(InvalidRequest, match="/v1/completions") as refusal:
        asyncio.run(tokenizer.encode_chat((Message("user", "hi"),), 256))
    assert refusal.value.field == "messages"


def test_template_error_is_repeated_in_the_refusal() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    tokenizer = Tokenizer(byte_tokenizer(template))
    with pytest.raises(InvalidRequest, match="no tools"):
        asyncio.run(tokenizer.encode_chat((Message("user", "hi"), Message("tool", "late")), 256))


def test_a_folder_without_a_tokenizer_is_refused_by_the_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"model\.path"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2", "gemma", "mistral"])
@pytest.mark.parametrize("kind", ["GPT2TokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "GemmaTokenizerFast"])
def test_tokens_are_those_of_the_file_whatever_class_the_folder_names(
    family: str, model_type: str, kind: str, tmp_path: Path
) -> None:
    """transformers builds most of these anew, with another normalizer, pre-tokenizer or decoder than the file's."""
    saved = FAMILIES[family]()
    saved.save(str(tmp_path / "tokenizer.json"))
    fields = {"tokenizer_class": kind, "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer = Tokenizer.load(tmp_path)
    for text in (*SAMPLES, "a b  c Hello world naïve", "cafe\u0301 12345  ok\n\nx"):
        ids = saved.encode(text, add_special_tokens=False).ids
        assert asyncio.run(tokenizer.encode(text, 4096, add_special_tokens=False)) == ids
        assert asyncio.run(tokenizer.decode_all(ids)) == saved.decode(ids, skip_special_tokens=False)


def test_tokenizer_that_cannot_be_the_files_is_refused_with_the_text(tmp_path: Path) -> None:
    saved = FAMILIES["byte-level"]()
    saved.save(str(tmp_path / "tokenizer.json"))
    # tokenizer_config.json gives an id that the file has no room for, and transformers makes another tokenizer.
    decoder = {"1000": {"content": "<|far|>", "special": True}}
    fields = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(SettingsError, match=r"is not its tokenizer\.json: .*<\|far\|>"):
        Tokenizer.load(tmp_path)


def test_text_beyond_the_limit_is_tokenized_up_to_it_only() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    encode, seen = tokenizer._tokenizer.encode, []

    def count(text: str, *, add_special_tokens: bool) -> list[int]:
        seen.append(len(text))
        return encode(text, add_special_tokens=add_special_tokens)

    tokenizer._tokenizer.encode = count
    token_ids = asyncio.run(tokenizer.encode("x" * 1_000_000, 256))
    assert len(token_ids) > 256
    assert sum(seen) < 10_000
    assert asyncio.run(tokenizer.encode("x" * 5000, 5000)) == [257, *b"x" * 5000]


def test_long_texts_of_one_tenant_leave_threads_to_others() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    encode, running, most = tokenizer._tokenizer.encode, [], []
    started, release = threading.Semaphore(0), threading.Event()

    def hold(text: str, *, add_special_tokens: bool) -> list[int]:
        if text.startswith("slow"):
            running.append(text)
            most.append(len(running))
            started.release()
            release.wait(60)
            running.remove(text)
        return encode(text, add_special_tokens=add_special_tokens)

    async def test() -> None:
        slow = [asyncio.create_task(tokenizer.encode("slow" * 1000, 5000, "greedy")) for _ in range(8)]
        await asyncio.to_thread(started.acquire, timeout=60)
        await asyncio.wait_for(tokenizer.encode("fast" * 1000, 5000, "other"), 60)
        release.set()
        await asyncio.gather(*slow)

    tokenizer._tokenizer.encode = hold
    asyncio.run(test())
    assert max(most) == 1


def test_pair_of_texts_has_types_if_the_tokenizer_gives_them() -> None:
    tokenizer = Tokenizer(word_tokenizer())
    token_ids, second = asyncio.run(tokenizer.encode_pair(TextPair("is it?", "yes, it is")))
    pair = word_tokenizer()("is it?", "yes, it is")
    assert token_ids == pair["input_ids"]
    assert pair["token_type_ids"] == [0] * second + [1] * (len(token_ids) - second)


def test_pair_of_texts_of_a_tokenizer_without_types_has_none(tmp_path: Path) -> None:
    """XLM-RoBERTa's kind: pieces of sentences, and two marks between the texts."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *(("\u2581" + w, -2.0) for w in "abc")]
    saved = transformers.XLMRobertaTokenizer(vocab=[*pieces, ("<mask>", 0.0)])
    saved.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    token_ids, second = asyncio.run(tokenizer.encode_pair(TextPair("a b", "c")))
    assert (token_ids, second) == (saved("a b", "c")["input_ids"], None)
    assert saved.convert_ids_to_tokens(token_ids) == ["<s>", "\u2581a", "\u2581b", "</s>", "</s>", "\u2581c", "</s>"]
    assert tokenizer.special_edges(token_ids) == (1, 1)

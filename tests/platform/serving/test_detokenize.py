from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, sentencepiece
from tokenizers import Tokenizer

from loramux.serving.tokenizer import REPLACEMENT, Detokenizer

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def deltas(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode, prompt or [])
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(text=UNICODE)
def test_deltas_join_to_the_text_and_never_hold_half_a_character(family: Tokenizer, text: str) -> None:
    ids = family.encode(text).ids
    said = deltas(family, ids)
    assert "".join(said) == family.decode(ids)
    assert REPLACEMENT in text or not any(REPLACEMENT in delta for delta in said)


@settings(max_examples=150, deadline=None)
@given(prompt=UNICODE, text=UNICODE)
def test_a_continuation_reads_as_if_prompt_and_answer_were_one_text(family: Tokenizer, prompt: str, text: str) -> None:
    whole = family.encode(prompt + text).ids
    for cut in range(1, len(whole)):
        head, tail = whole[:cut], whole[cut:]
        spoken = family.decode(head)
        if REPLACEMENT not in spoken:
            assert spoken + "".join(deltas(family, tail, head)) == family.decode(whole)


def test_a_sentencepiece_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece()
    ids = [tokenizer.token_to_id(piece) for piece in ("▁Hello", "▁world")]
    assert deltas(tokenizer, ids[1:], ids[:1]) == [" world", ""]
    assert deltas(tokenizer, ids) == ["Hello", " world", ""]


@settings(max_examples=150, deadline=None)
@given(data=st.binary(min_size=1, max_size=200))
def test_bytes_that_are_no_utf8_come_out_as_the_tokenizer_decodes_them(data: bytes) -> None:
    tokenizer = byte_level()
    ids = bytes_to_ids(tokenizer, data)
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == data.decode(errors="replace")


def bytes_to_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Token ids of single bytes: the byte-level alphabet, by way of latin-1 text that stands for each."""
    table = {byte: tokenizer.token_to_id(char) for byte, char in byte_alphabet().items()}
    return [table[byte] for byte in data]


def byte_alphabet() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def test_special_tokens_neither_show_nor_break_a_character(family: Tokenizer) -> None:
    end = family.token_to_id("<|end|>")
    ids = family.encode("Hello world").ids
    mixed = [end, *(token for pair in zip(ids, [end] * len(ids), strict=True) for token in pair), *[end] * 200]
    assert "".join(deltas(family, mixed)).split() == ["Hello", "world"]


def test_the_window_stays_short_however_long_the_text(family: Tokenizer) -> None:
    seen: list[int] = []

    def decode(ids: list[int]) -> str:
        seen.append(len(ids))
        return family.decode(ids)

    end = family.token_to_id("<|end|>")
    for ids in (family.encode("naïve 日本 " * 200).ids, [end] * 500, [family.encode("é").ids[-2]] * 500):
        detokenizer = Detokenizer(decode, ids)
        for token in ids:
            detokenizer.push(token)
    assert max(seen) <= 96 + 1

"""Tokenizers of the three families that bases have, small enough to make in a test."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

WORDS = ["Hello", "world", "the", "quick", "brown", "fox", "naïve", "Grüße", "日本", "🙂 ok", "stop", "END", "a b  c"]


def byte_level() -> Tokenizer:
    """256 tokens, one a byte: the smallest vocabulary that can say everything."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def byte_level_bpe() -> Tokenizer:
    """GPT-2's kind: merged tokens that may end in the middle of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama-2's kind: spaces are part of a token, the first one is dropped, unknown characters fall back to bytes."""
    pieces = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    ascii_words = [part for word in WORDS for part in word.split() if part.isascii()]
    pieces += sorted({piece for word in ascii_words for piece in (*word, word, "▁" + word)})
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", word) for word in ascii_words if len(word) == 1]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


FAMILIES = {"byte-level": byte_level, "byte-level-bpe": byte_level_bpe, "sentencepiece": sentencepiece}

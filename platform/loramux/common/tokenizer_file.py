"""Load a base's tokenizer exactly as its tokenizer.json has it.

For some classes and model types, transformers builds a new tokenizer from the vocabulary, with the class's own
normalizer, pre-tokenizer and decoder. If the tokenizer.json of a folder was made differently, the token ids differ
without an error. The `tokenizers` library reads the file unchanged. `load_tokenizer` compares both tokenizers on a
fixed text of many scripts and on the vocabulary itself. If they differ, it replaces transformers' inner tokenizer by
the file's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from loramux.common.bundle import TOKENIZER_FILE

SAMPLES = (
    "We need to add 9 and 6; they're 12345 or 3.14159, I'LL say, and 1,000,000.50 by 2026-11-26 at 07:05.",
    "  two spaces before, three   between,    four, and two at the end  ",
    "\tone tab,\t\ttwo\tand\r\na Windows line\n\nan empty line\n \n  indented\n",
    'def camelCase(snake_case, UPPER=0x1F):\n    return {"a": [1, 2], "b": f"{x!r}"}  # @todo!!',
    "https://example.org/a/b?c=d&e=%20#f, name@example.org, C:\\temp\\*.txt, $9.99, 50%, #1, a/b~c^d|e`f`",
    "Příliš žluťoučký kůň; Grüße aus Zürich; ça coûte 5 €; naïve cafés; Ænima; İstanbul; ŁÓDŹ; Straße",
    "decomposed: cafe\u0301 u\u0308ber n\u0303; joined: caf\u00e9; ligatures: \ufb01 \u00bd \u2460",
    "full width: \uff21\uff11\uff0c",
    "Съешь ещё этих мягких булок; Ξεσκεπάζω την ψυχοφθόρα βδελυγμία; Հայերեն; ქართული",
    "أَهْلاً وسهلاً ١٢٣؛ שָׁלוֹם עולם; فارسی‌ها; اردو",
    "नमस्ते दुनिया १२३; আমার সোনার; தமிழ் மொழி; తెలుగు; ภาษาไทยง่าย; ខ្មែរ; မြန်မာ; བོད་",
    "日本語のテキスト、カタカナとひらがな。中文測試：一二三，简体字！한국어 문장입니다. 조합: \u1112\u1161\u11ab",
    "🙂👍🏽👩‍👩‍👧‍👦🇪🇺 ❤️ ∑∫√∞≠≤ α→β ←↑ “quotes” ‘single’ — dash… •",
    "no-break\u00a0space, thin\u2009space, zero\u200bwidth, joiner\u200d, mark\ufeff, soft\u00adhyphen, line\u2028end",
)
"""A fixed text of many scripts. The usual pre-tokenizers and normalizers treat its parts differently."""
MAX_PIECES = 4096
"""Number of the vocabulary's tokens whose texts are compared too: a small vocabulary may merge no part of the samples.
"""
SHOWN_TOKENS = 12


logger = logging.getLogger(__name__)


class TokenizerDiffers(ValueError):
    """transformers' tokenizer makes other token ids than tokenizer.json, and cannot be given the file's."""


class LoadedTokenizer(NamedTuple):
    """A base's tokenizer."""

    tokenizer: Any
    """transformers' PreTrainedTokenizerBase, whose token ids are those of tokenizer.json, if the base has that file."""
    rebuilt: Any
    """The tokenizer (of the `tokenizers` library) that transformers had built, if it differed from the file's;
    otherwise None.
    """


def load_tokenizer(model_dir: Path) -> LoadedTokenizer:
    """Load the tokenizer next to a model's weights.

    Raises OSError or ValueError, as transformers does, if the folder has no tokenizer. Raises TokenizerDiffers.
    """
    from transformers import AutoTokenizer  # imported here: it takes seconds, and only serving a model needs it

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    file = model_dir / TOKENIZER_FILE
    if not file.is_file():
        return LoadedTokenizer(tokenizer, None)
    saved = read_tokenizer(file.read_text())
    if (difference := _loaded_difference(tokenizer, saved)) is None:
        return LoadedTokenizer(tokenizer, None)
    kind, rebuilt = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None)
    if rebuilt is None:
        raise TokenizerDiffers(f"transformers makes a {kind} of it, and {difference}")
    _add_tokens(saved, rebuilt)
    tokenizer._tokenizer = saved
    if (left := _loaded_difference(tokenizer, saved)) is not None:
        raise TokenizerDiffers(f"transformers makes a {kind} of it, and {left}")
    logger.warning(
        "%s is served as it is: transformers makes a %s of it whose tokens are others (%s). Adapters are right if they "
        "were trained with the file's tokens.",
        file,
        kind,
        difference,
    )
    return LoadedTokenizer(tokenizer, rebuilt)


def read_tokenizer(text: str) -> Any:
    """Read a tokenizer.json as the `tokenizers` library does, without the settings of training (truncation, padding).

    Raises ValueError.
    """
    import tokenizers  # imported here: commands without a model do not need it

    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises its root class
        raise ValueError(f"the tokenizers library cannot read {TOKENIZER_FILE}: {str(error)[:200]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _add_tokens(saved: Any, rebuilt: Any) -> None:
    """Add to `saved` the tokens that only tokenizer_config.json names. Raises TokenizerDiffers if an id differs."""
    known = {token.content for token in saved.get_added_tokens_decoder().values()}
    for id, token in sorted(rebuilt.get_added_tokens_decoder().items()):
        if token.content not in known:
            saved.add_tokens([token])
            if (found := saved.token_to_id(token.content)) != id:
                raise TokenizerDiffers(f"tokenizer_config.json gives {token.content[:80]!r} the id {id}, not {found}")


def _loaded_difference(loaded: Any, saved: Any) -> str | None:
    """Compare transformers' tokenizer with the file's; see tokenizer_difference."""
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is not None:
        return tokenizer_difference(backend, saved)

    def encode(text: str) -> list[int]:
        return list(loaded.encode(text, add_special_tokens=False))

    def decode(ids: list[int]) -> str:
        return str(loaded.decode(ids, clean_up_tokenization_spaces=False))

    return _difference(encode, decode, {str(token) for token in loaded.get_added_vocab()}, saved)


def tokenizer_difference(tokenizer: Any, saved: Any) -> str | None:
    """Compare two tokenizers of the `tokenizers` library; `saved` is read from a file.

    Return a sentence about the first text on which they differ, or None.
    """

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    own = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    return _difference(encode, decode, own, saved)


def _difference(
    encode: Callable[[str], list[int]], decode: Callable[[list[int]], str], added: set[str], saved: Any
) -> str | None:
    # The loaded tokenizer also recognises tokens that only tokenizer_config.json adds; the file's tokenizer does not.
    beside = added - {token.content for token in saved.get_added_tokens_decoder().values()}
    for text in (*SAMPLES, "".join(SAMPLES), *_pieces(saved)):
        if any(token in text for token in beside):
            continue
        try:
            ids = saved.encode(text, add_special_tokens=False).ids
        except Exception:  # noqa: S112 - the library raises its root class, for a text that its vocabulary lacks
            continue
        try:
            found, back = encode(text), decode(ids)
        except Exception as error:
            return f"of {text[:60]!r} it makes no tokens: {str(error)[:120]}"
        if found != ids:
            at = next((i for i, pair in enumerate(zip(found, ids, strict=False)) if pair[0] != pair[1]), len(ids))
            start = max(0, at - 2)
            shown = [list(tokens[start : start + SHOWN_TOKENS]) for tokens in (ids, found)]
            return f"of {text[:60]!r} the file makes the tokens {shown[0]} from token {start} on, the other {shown[1]}"
        if back != (wanted := saved.decode(ids, skip_special_tokens=False)):
            return f"the tokens {ids[:SHOWN_TOKENS]} mean {wanted[:60]!r} by the file, by the other {back[:60]!r}"
    return None


def _pieces(saved: Any) -> Iterator[str]:
    """Yield the texts of up to MAX_PIECES tokens, spread over the vocabulary, each alone and between other texts."""
    ids = sorted(saved.get_vocab(with_added_tokens=True).values())
    for id in ids[:: max(1, len(ids) // MAX_PIECES + 1)]:
        text = saved.decode([id], skip_special_tokens=False)
        if text and "\ufffd" not in text:
            yield text
            yield f"a{text} {text}\n1"

"""The base model's own tokenizer and chat template, as transformers loads them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from loramux.gateway.ask import Conversation, Token
from loramux.gateway.errors import InvalidRequest
from loramux.settings import SettingsError

_LONG = 4096
"""Characters from which a text is tokenised on a thread: about a millisecond's work."""
_byte_piece = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Texts and conversations to token ids, and back. Safe to use from threads."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a transformers PreTrainedTokenizerBase."""
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes_of = _byte_alphabet() if "ByteLevel" in repr(getattr(backend, "decoder", None)) else None
        self.longest_token: int = max(map(len, tokenizer.get_vocab()))
        """Characters that a token stands for, at most."""
        self.token: Callable[[int], Token] = lru_cache(maxsize=65536)(self._token)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """The one that lies beside the model's weights; raises SettingsError where there is none."""
        from transformers import AutoTokenizer  # seconds: not for those who only print a --help

        try:
            return cls(AutoTokenizer.from_pretrained(model_dir, local_files_only=True))
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"model.path: {model_dir} holds no tokenizer that transformers can load: {error}"
            ) from None

    async def encode(self, text: str) -> list[int]:
        """Token ids of a text to continue, with the special tokens that the model expects around it."""
        return await self._encode(text, add_special_tokens=True)

    async def encode_chat(self, conversation: Conversation) -> list[int]:
        """Token ids of the conversation in the model's chat template, up to where the assistant begins to speak.

        Raises InvalidRequest where the model has no template, or where the template refuses the conversation.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "The base model has no chat template; send the text itself to /v1/completions.",
                param="messages",
                code="chat_not_supported",
            )
        size = sum(len(message.content) for message in conversation)
        text = await asyncio.to_thread(self._render, conversation) if size > _LONG else self._render(conversation)
        return await self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: list[int]) -> str:
        """The text of the tokens, without special ones."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) > _LONG:
            return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _render(self, conversation: Conversation) -> str:
        from jinja2 import TemplateError

        messages = [{"role": message.role, "content": message.content} for message in conversation]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise InvalidRequest(
                f"The base model's chat template refuses these messages: {error}", param="messages"
            ) from None

    def _token(self, token_id: int) -> Token:
        data = self._spell(token_id)
        try:
            return Token(data.decode(), data)
        except UnicodeDecodeError:
            return Token("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data)

    def _spell(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None or token_id in self._tokenizer.all_special_ids:
            return (piece or "").encode()
        if self._bytes_of and all(character in self._bytes_of for character in piece):
            return bytes(self._bytes_of[character] for character in piece)
        if match := _byte_piece.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte, inverted (`bytes_to_unicode`)."""
    printable: Sequence[int] = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

"""Convert text to token ids and back, with the base model's own tokenizer and chat template, and decode tokens when
they arrive.

`Tokenizer` wraps what transformers loads. `Detokenizer` gives out the text of a generation token by token, and
`StopMatcher` passes this text on up to a stop string. Text that was given out never has to be taken back.

A template may refuse a conversation that clients cannot change: later system and developer turns, two consecutive turns
of one role, an empty answer. `render_accepted` tries the original conversation first, and then rewrites more and more
of it. No word of a turn's text is lost.

`StopAutomaton` is Aho and Corasick's (Efficient string matching, CACM 18(6), 1975): a trie of the stop strings in which
every state knows its longest proper suffix that is also a state. A text is read once, in constant time per character
(amortised), independent of the number and length of the stop strings. The depth of the current state is the number of
characters that must be held back.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from loramux.common.bundle import TOKENIZER_FILE, AddedToken, extend_tokenizer
from loramux.common.jobs import ThreadPool
from loramux.common.settings.file import SettingsError
from loramux.common.tokenizer_file import TokenizerDiffers, load_tokenizer
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import ChatOptions, Conversation, Message, PlacedImage, PromptText, TextPair, Token

T = TypeVar("T")
TAIL_CHARACTERS = 64
"""Length of the prompt's end that shows whether the answer begins within a thought, in characters."""
_LONG = 1024
"""Length from which a text is tokenized on a thread, in characters: about 1 ms of work."""
_MESSAGE_CHARACTERS = 64
"""Work of a template per message, expressed in characters."""
_CHARACTERS_PER_TOKEN = 4
"""Characters per token, assumed for the first part of a long text that is tokenized."""
_CUT_TOKENS = 64
"""A cut at the end of a text's beginning changes fewer tokens than this."""
_THREADS = 4
Decode = Callable[[list[int]], str]
REPLACEMENT = "\ufffd"
_CUTS = range(4, 9)
"""Window lengths that are tried when cutting: a character has at most four byte tokens, so one of five cuts is at an
edge.
"""
_WINDOW = 24
"""Tokens of context before a cut is tried."""
_LONGEST_WINDOW = 96
"""Number of tokens after which a text without a complete last character is given out anyway: it is not UTF-8."""
_UNFINISHED = 3
"""Number of characters of such a text that may still become one character: a lead byte and two more."""
_CHARACTERS = 0x110000
"""Unicode's code points: an edge of a StopAutomaton is the integer `state * _CHARACTERS + code point`."""

_BETWEEN_TURNS = "\n\n"
"""Text between the texts of turns that are joined."""

_byte_piece = re.compile(r"<0x([0-9A-F]{2})>")


class RenderedChat(NamedTuple):
    """A conversation in a model's chat template."""

    token_ids: list[int]
    tail: str
    """End of the prompt's text, TAIL_CHARACTERS long."""


class Tokenizer:
    """Converts texts and conversations to token ids, and back. Thread-safe."""

    def __init__(self, tokenizer: Any, base: Tokenizer | None = None) -> None:
        """`tokenizer` is a transformers PreTrainedTokenizerBase. A tokenizer that extends `base` shares its threads."""
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes_of = _byte_alphabet() if "ByteLevel" in repr(getattr(backend, "decoder", None)) else None
        self._special_ids = _special_ids(tokenizer)
        self.decode = _fast_decode(tokenizer)
        """Returns the text of tokens, without special ones."""
        self.longest_token: int = base.longest_token if base else max(map(len, tokenizer.get_vocab()))
        """Maximum number of characters that one token stands for."""
        self.serialized: str | None = base.serialized if base else _serialized(tokenizer)
        """The vocabulary as the `tokenizers` library writes it; None if the tokenizer does not use this library."""
        self._threads: ThreadPool = base._threads if base else ThreadPool("tokenizer", _THREADS, per_tenant=1)
        self.token: Callable[[int], Token] = lru_cache(maxsize=1 << 18)(self._token)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Load the tokenizer next to the model's weights.

        Raises SettingsError if the folder has no tokenizer, or if the tokenizer's ids differ from those of
        tokenizer.json.
        """
        try:
            return cls(load_tokenizer(model_dir).tokenizer)
        except TokenizerDiffers as error:
            raise SettingsError(
                f"model.path: the tokenizer of {model_dir} is not its {TOKENIZER_FILE}: {error}. Every answer would be "
                "to another text than the one that was sent. Save the tokenizer again with AutoTokenizer and "
                "save_pretrained, from the folder that the base was trained with."
            ) from None
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"model.path: {model_dir} holds no tokenizer that transformers can load: {error}"
            ) from None

    def extended(self, added: Sequence[AddedToken]) -> Tokenizer:
        """Return this tokenizer with the `added` tokens; both share one model and the same threads."""
        extended = copy.copy(self._tokenizer)
        extended._tokenizer = extend_tokenizer(self._tokenizer.backend_tokenizer, added)
        tokenizer = Tokenizer(extended, self)
        tokenizer.longest_token = max(self.longest_token, *(len(token.content) for token in added))
        return tokenizer

    def describe(self) -> dict[str, Any]:
        """Return the class and the special tokens, under the names of a tokenizer_config.json."""
        special = {
            name: str(text) for name, text in self._tokenizer.special_tokens_map.items() if isinstance(text, str)
        }
        return {"tokenizer_class": type(self._tokenizer).__name__} | special

    async def encode(self, text: str, limit: int, tenant: str = "", *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text to continue, with the special tokens that the model expects around it.

        For a text of more than `limit` tokens, the result may be only a beginning with more than `limit` tokens. Each
        tenant has one text at a time on a thread outside of the event loop.
        """
        work = partial(self.encode_now, text, limit, add_special_tokens=add_special_tokens)
        return await self.run(work, len(text), tenant)

    async def places(
        self, text: str, tenant: str = "", *, add_special_tokens: bool = True
    ) -> list[tuple[int, int] | None]:
        """Return the place of each token of `encode` in the text, `[start, end)` in characters. Special tokens around
        the text have no place; no token has one if transformers' tokenizer is not of the `tokenizers` library.
        """
        work = partial(self._places, text, add_special_tokens=add_special_tokens)
        return await self.run(work, len(text), tenant)

    def _places(self, text: str, *, add_special_tokens: bool) -> list[tuple[int, int] | None]:
        if not self._tokenizer.is_fast:
            return [None] * len(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        found = self._tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        places = zip(found["offset_mapping"], found["special_tokens_mask"], strict=True)
        return [None if is_special else place for place, is_special in places]

    async def encode_pair(
        self, pair: TextPair, tenant: str = "", *, add_special_tokens: bool = True
    ) -> tuple[list[int], int | None]:
        """Return the token ids of two texts in one, and the first token of the second if the model tells them apart.

        For `tenant` see `encode`.
        """
        work = partial(self._encode_pair, pair, add_special_tokens=add_special_tokens)
        return await self.run(work, len(pair), tenant)

    async def encode_chat(
        self, conversation: Conversation, limit: int, tenant: str = "", options: ChatOptions | None = None
    ) -> RenderedChat:
        """Return the conversation's token ids in the model's chat template, up to the assistant's answer.

        For `limit` and `tenant` see `encode`. Raises InvalidRequest if the model has no template, or if the template
        refuses the conversation.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest(
                "The base model has no chat template; send the text itself to /v1/completions.",
                field="messages",
                code="chat_not_supported",
            )
        options = options or ChatOptions()
        size = sum(len(message.content) + message.size for message in conversation) + options.size
        work = partial(self._encode_chat, conversation, limit, options)
        return await self.run(work, size + _MESSAGE_CHARACTERS * len(conversation), tenant)

    @property
    def transformers_tokenizer(self) -> Any:
        """The tokenizer of transformers, which its trainers take."""
        return self._tokenizer

    @property
    def end_id(self) -> int | None:
        """The token that ends a text, as the tokenizer's own settings say."""
        found = self._tokenizer.eos_token_id
        return found if found is None else int(found)

    @property
    def chat_template(self) -> str:
        """The chat template, or several templates joined; empty without a template."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else "\n".join(template.values())

    def token_id(self, text: str) -> int | None:
        """Return the token whose text is exactly `text`; None without such a token."""
        found = self._tokenizer.get_added_vocab().get(text)
        return found if found is None else int(found)

    def special_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the texts among `texts` that are special tokens, which `decode` leaves out."""
        found = {text: self.token_id(text) for text in texts}
        return {text: token for text, token in found.items() if token is not None and token in self._special_ids}

    def grammar_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the texts among `texts` that a grammar must name by their token, because these tokens have no text in
        the grammar's vocabulary.

        For llguidance these are special tokens, and all added tokens in angle brackets. For `decode`, some of them are
        not special: for example, Qwen's `<tool_call>`.
        """
        found = {text: self.token_id(text) for text in texts}
        return {
            text: token
            for text, token in found.items()
            if token is not None and (token in self._special_ids or (text.startswith("<") and text.endswith(">")))
        }

    async def spell(self, token_ids: list[int], tenant: str = "") -> PromptText:
        """Return the text of tokens without special tokens, and the beginning of each token's text. For `tenant` see
        `encode`.
        """
        return await self.run(partial(self._spell_all, token_ids), len(token_ids) * _CHARACTERS_PER_TOKEN, tenant)

    def special_edges(self, token_ids: list[int]) -> tuple[int, int]:
        """Return the numbers of special tokens at the beginning and at the end of a text's tokens."""
        first = next((i for i, token in enumerate(token_ids) if token not in self._special_ids), len(token_ids))
        rest = reversed(token_ids[first:])
        return first, next((i for i, token in enumerate(rest) if token not in self._special_ids), 0)

    def pieces(self, token_ids: list[int]) -> list[str]:
        """Return tokens as the vocabulary writes them."""
        return [piece or "" for piece in self._tokenizer.convert_ids_to_tokens(token_ids)]

    async def decode_all(self, token_ids: list[int], tenant: str = "") -> str:
        """Return the text of tokens, including special ones. For `tenant` see `encode`."""
        decode = partial(self._tokenizer.decode, token_ids, clean_up_tokenization_spaces=False)
        return await self.run(decode, len(token_ids) * _CHARACTERS_PER_TOKEN, tenant)

    async def all_pieces(self, token_ids: list[int], tenant: str = "") -> list[str]:
        """Return many tokens as the vocabulary writes them. For `tenant` see `encode`."""
        return await self.run(partial(self.pieces, token_ids), len(token_ids) * _CHARACTERS_PER_TOKEN, tenant)

    def close(self) -> None:
        """End the threads."""
        self._threads.close()

    async def run(self, work: Callable[[], T], size: int, tenant: str) -> T:
        """Run short work immediately and long work on a thread. A tenant has at most one thread, so that other tenants
        find a free thread.

        `size` is the size of the work, in characters to tokenize.
        """
        if size <= _LONG:
            return work()
        return await self._threads.run(tenant, work)

    def _encode_chat(self, conversation: Conversation, limit: int, options: ChatOptions) -> RenderedChat:
        text = self.render(conversation, options)
        if options.image_texts is not None:
            text = text.replace(*options.image_texts)
        token_ids = self.encode_now(text, limit, add_special_tokens=options.add_special_tokens)
        return RenderedChat(token_ids, text[-TAIL_CHARACTERS:])

    def _encode_pair(self, pair: TextPair, *, add_special_tokens: bool) -> tuple[list[int], int | None]:
        found = self._tokenizer(pair.first, pair.second, add_special_tokens=add_special_tokens)
        types = found.get("token_type_ids") or ()
        return found["input_ids"], types.index(1) if 1 in types else None

    def encode_now(self, text: str, limit: int, *, add_special_tokens: bool) -> list[int]:
        """Return the same as `encode`, on the caller's thread.

        Longer and longer beginnings are tokenized, so that a text that is too long takes no more time than the longest
        text that fits.
        """
        length = _CHARACTERS_PER_TOKEN * (limit + _CUT_TOKENS)
        while length < len(text):
            beginning: list[int] = self._tokenizer.encode(text[:length], add_special_tokens=add_special_tokens)
            if len(beginning) > limit + _CUT_TOKENS:
                return beginning
            length *= 2
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids

    def render(self, conversation: Conversation, options: ChatOptions) -> str:
        """Return the conversation's text in the model's chat template. Raises InvalidRequest."""
        text, form = render_accepted(conversation, partial(self._apply_template, options=options))
        return open_last_message(text, form) if options.ending == "open_message" else text

    def _apply_template(self, conversation: Conversation, options: ChatOptions) -> str:
        from jinja2 import TemplateError

        messages = template_messages(conversation)
        ends_with_prompt = options.ending == "generation_prompt"
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=ends_with_prompt, **options.template
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise TemplateRefusal(
                f"The base model's chat template refuses these messages: {error}", field="messages"
            ) from None
        return text

    def _spell_all(self, token_ids: list[int]) -> PromptText:
        detokenizer, parts, offsets, length = Detokenizer(self.decode), [], [], 0
        for token_id in token_ids:
            offsets.append(length)
            parts.append(detokenizer.push(token_id))
            length += len(parts[-1])
        parts.append(detokenizer.flush())
        return PromptText("".join(parts), [self.token(token_id) for token_id in token_ids], offsets)

    def _token(self, token_id: int) -> Token:
        data = self._spell(token_id)
        try:
            return Token(data.decode(), data, token_id)
        except UnicodeDecodeError:
            return Token("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data, token_id)

    def _spell(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None or token_id in self._special_ids:
            return (piece or "").encode()
        if self._bytes_of and all(character in self._bytes_of for character in piece):
            return bytes(self._bytes_of[character] for character in piece)
        if match := _byte_piece.fullmatch(piece):
            return bytes.fromhex(match[1])
        return piece.replace("▁", " ").encode()


def _serialized(tokenizer: Any) -> str | None:
    from transformers import PreTrainedTokenizerFast

    return tokenizer.backend_tokenizer.to_str() if isinstance(tokenizer, PreTrainedTokenizerFast) else None


class TemplateRefusal(InvalidRequest):
    """A template refuses a conversation, and may accept another form of it."""


def template_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return the messages as chat templates expect them."""
    return [{"role": message.role, "content": _template_content(message), **message.fields} for message in conversation]


def _template_content(message: Message) -> str | list[dict[str, str]]:
    """Return a turn's text, or its texts and images."""
    if not message.images:
        return message.content
    parts, begin = list[dict[str, str]](), 0
    for offset, _ in message.images:
        parts += [{"type": "text", "text": message.content[begin:offset]}, {"type": "image"}]
        begin = offset
    parts.append({"type": "text", "text": message.content[begin:]})
    return [part for part in parts if part.get("text") != ""]


def join_turns(turns: Sequence[Message]) -> Message:
    """Return one turn with the texts and images of all `turns`, which have no other fields."""
    content, images = "", list[PlacedImage]()
    for turn in turns:
        if content and turn.content:
            content += _BETWEEN_TURNS
        images += [PlacedImage(len(content) + offset, source) for offset, source in turn.images]
        content += turn.content
    return replace(turns[0], content=content, images=tuple(images))


def render_accepted(conversation: Conversation, render: Callable[[Conversation], str]) -> tuple[str, Conversation]:
    """Return the text of the first form that `render` accepts and that shows all instructions, and the form.

    If all forms are refused, raises the refusal of the original conversation.
    """
    later = [turn.content.strip() for turn in _later_instructions(conversation)]
    refusal: TemplateRefusal | None = None
    incomplete: tuple[str, Conversation] | None = None
    for form in _forms(conversation):
        try:
            text = render(form)
        except TemplateRefusal as error:
            refusal = refusal or error
            continue
        if all(instructions in text for instructions in later):
            return text, form
        incomplete = incomplete or (text, form)
    if incomplete is not None:
        return incomplete
    assert refusal is not None, "there is one form at least"
    raise refusal


def _forms(conversation: Conversation) -> Iterator[Conversation]:
    """Yield the original conversation, then a form with later instructions in the first turn, then a form in which
    turns are also joined.
    """
    yield conversation
    folded = _fold_instructions(conversation)
    if folded != conversation:
        yield folded
    joined = _join_turns(folded)
    if joined != folded:
        yield joined


def _later_instructions(conversation: Conversation) -> Iterable[Message]:
    return (turn for turn in conversation[1:] if turn.role == "system")


def _fold_instructions(conversation: Conversation) -> Conversation:
    if not any(_later_instructions(conversation)):
        return conversation
    instructions = [turn for turn in conversation if turn.role == "system"]
    return (join_turns(instructions), *(turn for turn in conversation if turn.role != "system"))


def _join_turns(conversation: Conversation) -> Conversation:
    """Join neighbouring turns of the user, and of the assistant without calls; leave out empty answers."""
    turns: list[Message] = []
    for number, turn in enumerate(conversation, start=1):
        is_empty = turn.role == "assistant" and not turn.content and "tool_calls" not in turn.fields
        if is_empty and number < len(conversation):
            continue
        last = turns[-1] if turns else None
        if last and last.role == turn.role and turn.role in ("user", "assistant") and not (last.fields or turn.fields):
            turns[-1] = join_turns((last, turn))
        else:
            turns.append(turn)
    return tuple(turns)


def open_last_message(text: str, conversation: Conversation) -> str:
    """Return a rendered conversation up to the end of its last message's content, as in transformers.

    Raises InvalidRequest if the template does not show that content.
    """
    content = conversation[-1].content
    begin = text.rfind(content.strip())
    if begin < 0 or not content.strip():
        raise InvalidRequest(
            "'continue_final_message' continues a text that the chat template shows, and it shows none of the last "
            "message; leave it out.",
            field="continue_final_message",
        )
    whole = content.lstrip()  # a template may strip the blanks at its end
    end = begin + len(whole if text.startswith(whole, begin) else content.strip())
    return text[:end]


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that decoding leaves out: tokens with a role, and added tokens that are marked as special.

    transformers lists only tokens with a role; markers such as Mistral's `[TOOL_CALLS]` have no role.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token for token, content in added.items() if content.special}


def _fast_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return transformers' decoding without its wrappers, which take three quarters of its time."""
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(tokenizer)._decode is not PreTrainedTokenizerFast._decode:
        return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return partial(backend.decode, skip_special_tokens=True)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for every byte, inverted (`bytes_to_unicode`)."""
    printable: Sequence[int] = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Detokenizer:
    """The text of one generation, token by token.

    The detokenizer decodes a short window of the latest tokens instead of single tokens, because a token's text depends
    on its neighbours: a character may span tokens, and a sentencepiece decoder drops the space of the first token it
    sees. The window begins with the end of the prompt, so that a continuation keeps its leading space. `decode` is the
    tokenizer's own and skips special tokens.

    A text that ends in U+FFFD waits for further tokens. With byte fallback, one unfinished character turns every
    character of its run of byte tokens into U+FFFD, so no part of the text is reliable at that moment.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = _end_of_prompt(decode, list(prompt_token_ids[-_LONGEST_WINDOW:]))
        self._text = decode(self._ids)
        self._num_given = len(self._text)

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; empty in the middle of a character."""
        self._ids.append(token_id)
        before, self._text = self._text, self._decode(self._ids)
        if not self._text.endswith(REPLACEMENT):
            return self._push_whole(before)
        if len(self._ids) < _LONGEST_WINDOW:
            return ""
        given = self._give(len(self._text) - _UNFINISHED)
        self._cut()
        return given

    def flush(self) -> str:
        """Return the remaining text at the end. An unfinished character becomes U+FFFD."""
        return self._give(len(self._text))

    def _push_whole(self, before: str) -> str:
        if self._text and self._text == before:
            self._ids.pop()  # a special token: no text, so no context either
        given = self.flush()
        if len(self._ids) >= _WINDOW:
            self._cut()
        return given

    def _give(self, end: int) -> str:
        delta = self._text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        return delta

    def _cut(self) -> None:
        """Forget old tokens, if the rest decodes to exactly the end of the same text."""
        num_left = len(self._text) - self._num_given
        for keep in _CUTS:
            text = self._decode(self._ids[-keep:])
            if self._text.endswith(text) and len(text) >= num_left and (text or not self._text):
                self._ids, self._text, self._num_given = self._ids[-keep:], text, len(text) - num_left
                return


def _end_of_prompt(decode: Decode, ids: list[int]) -> list[int]:
    """Return the shortest end of the prompt that decodes to valid text; the whole prompt if there is no such end."""
    ends = (ids[-keep:] for keep in _CUTS)
    return next((end for end in ends if (text := decode(end)) and REPLACEMENT not in text), ids)


class StopAutomaton:
    """Automaton of the stop strings of a request. The choices of a request share the automaton, and each choice has its
    own StopMatcher.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: dict[int, int] = {}
        """Next state by state and character. The table is one flat dict, because thousands of small dicts would trigger
        the garbage collector.
        """
        self.fallback: list[int] = [0]
        """The longest proper suffix of every state that is also a state; state 0 is the empty text."""
        self.depth: list[int] = [0]
        """Number of characters of every state."""
        self.stop: list[str | None] = [None]
        """The longest stop string with which every state ends."""
        edges: list[tuple[int, int, str]] = []
        for stop in stops:
            self._add(stop, edges)
        self._link(edges)

    def _add(self, stop: str, edges: list[tuple[int, int, str]]) -> None:
        state = 0
        for depth, character in enumerate(stop, start=1):
            following = self.next.get(state * _CHARACTERS + ord(character))
            if following is None:
                following = self.next[state * _CHARACTERS + ord(character)] = len(self.depth)
                edges.append((depth, state, character))
                self.fallback.append(0)
                self.depth.append(depth)
                self.stop.append(None)
            state = following
        self.stop[state] = stop or None

    def _link(self, edges: list[tuple[int, int, str]]) -> None:
        """Set the fallbacks breadth first: a state's fallback is shorter, and therefore linked already."""
        edges.sort()
        for _, state, character in edges:
            following = self.next[state * _CHARACTERS + ord(character)]
            if state:
                self.fallback[following] = self.advance(self.fallback[state], character)
            self.stop[following] = self.stop[following] or self.stop[self.fallback[following]]

    def advance(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        code = ord(character)
        while state and state * _CHARACTERS + code not in self.next:
            state = self.fallback[state]
        return self.next.get(state * _CHARACTERS + code, 0)


class StopMatcher:
    """Passes text on until a stop string is complete, and never passes on a part of a stop string.

    The text ends as soon as it ends with a stop string; if two end at the same character, the longer one counts. The
    result depends only on the text, not on its division into pieces.
    """

    def __init__(self, stops: StopAutomaton) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        """End of the text that may be the beginning of a stop string; its length is the depth of the state."""
        self.matched: str | None = None
        """Stop string that ended the text."""

    @property
    def num_held(self) -> int:
        """Number of characters that are held back."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Return the part of the text that can be shown and has not been shown; do not call this method after `matched`
        is set.
        """
        if not self._stops.next:
            return text
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._stops.advance(self._state, character)
            self.matched = self._stops.stop[self._state]
            if self.matched is not None:
                shown = (self._held + text)[: end - len(self.matched)]
                self._held = ""
                return shown
        text = self._held + text
        shown_until = len(text) - self._stops.depth[self._state]
        self._held = text[shown_until:]
        return text[:shown_until]

    def flush(self) -> str:
        """Return the held text at the end, because it was not the beginning of a stop string."""
        held, self._held = self._held, ""
        return held

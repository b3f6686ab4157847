"""Examples as token sequences: rendered and tokenized as the serving layer does, learned where the assistant wrote.

At the n-th message, serving renders the messages before it up to the beginning of the assistant's answer, and the model
writes the rest. So the learned tokens of message n are those that `messages[:n + 1]` has beyond the prompt for
`messages[:n]`, up to the token that ends the answer. This needs no marks in the template.

Some templates render an earlier turn differently when later ones follow: they leave out its thought, for example. Such
a conversation becomes one sequence for each learned message, so that each is learned with exactly the prompt that it is
served with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from loramux.serving.messages import ChatOptions
from loramux.serving.tokenizer import Tokenizer
from loramux.training.examples import Example, Turn, conversation_of


class Unlearnable(Exception):
    """An example cannot be learned with this template or within this context; the message says why."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Token ids, and for each token if the model learns it."""

    token_ids: tuple[int, ...]
    learned: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and two answers to it, of which the first is preferred."""

    prompt: tuple[int, ...]
    preferred: tuple[int, ...]
    rejected: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes examples for one base."""

    tokenizer: Tokenizer
    stop_ids: Collection[int]
    """Tokens that end an answer."""
    end_id: int
    """The token that ends an answer whose template writes none."""
    context: int
    """Maximum number of tokens of a sequence."""

    def sequences(self, example: Example) -> list[Sequence]:
        """Return the sequences of an example. Raises Unlearnable, InvalidRequest."""
        turns = example.turns
        whole = self._tokens(turns, example, ending="message")
        spans = []
        for number, answer in self._answers(example):
            first, end = len(answer.prompt), len(answer.prompt) + len(answer.written)
            if not answer.is_ended or whole[:end] != answer.prompt + answer.written:
                break
            spans.append((number, first, end))
        else:
            last = spans[-1][2]
            learned = [False] * last
            for _, first, end in spans:
                learned[first:end] = [True] * (end - first)
            return [Sequence(tuple(whole[:last]), tuple(learned))]
        return [self._alone(answer) for _, answer in self._answers(example)]

    def pair(self, example: Example) -> Pair:
        """Return the prompt and the two answers of a preference. Raises Unlearnable, InvalidRequest."""
        shared = example.turns[: example.num_shared]
        preferred, rejected = (
            self._answer(replace_turns(example, (*shared, *answers)), example.num_shared)
            for answers in (example.turns[example.num_shared :], example.rejected)
        )
        return Pair(tuple(preferred.prompt), *(tuple(self._ended(answer)) for answer in (preferred, rejected)))

    def last_answer(self, example: Example) -> tuple[list[int], list[int]]:
        """Return the prompt and the tokens of the last message to learn. Raises Unlearnable, InvalidRequest."""
        answer = self._answer(example, example.last_learned)
        return answer.prompt, answer.written

    def _answers(self, example: Example) -> Iterator[tuple[int, _Answer]]:
        for number, turn in enumerate(example.turns):
            if turn.is_learned:
                yield number, self._answer(example, number)

    def _answer(self, example: Example, number: int) -> _Answer:
        """Return the prompt of the message `number`, and what the model writes after it."""
        turns = example.turns
        prompt = self._tokens(turns[:number], example, ending="generation_prompt")
        full = self._tokens(turns[: number + 1], example, ending="message")
        is_continued = full[: len(prompt)] == prompt
        written = full[len(prompt) :] if is_continued else self._continuation(turns, example, number)
        for place, token in enumerate(written):
            if token in self.stop_ids:
                return _Answer(prompt, written[: place + 1], is_ended=True)
        return _Answer(prompt, written, is_ended=False)

    def _continuation(self, turns: tuple[Turn, ...], example: Example, number: int) -> list[int]:
        """Return the tokens of an answer whose first characters a tokenizer would join to its prompt's last ones."""
        before = self._text(turns[:number], example, ending="generation_prompt")
        after = self._text(turns[: number + 1], example, ending="message")
        if not after.startswith(before):
            raise Unlearnable(
                f"messages[{number}]: the chat template begins the assistant's message in another way than the answer "
                "of a request; the model would learn what it is never asked to write"
            )
        return self.tokenizer.encode_now(after[len(before) :], self.context, add_special_tokens=False)

    def _alone(self, answer: _Answer) -> Sequence:
        written = self._ended(answer)
        learned = (*[False] * len(answer.prompt), *[True] * len(written))
        return Sequence((*answer.prompt, *written), learned)

    def _ended(self, answer: _Answer) -> list[int]:
        return answer.written if answer.is_ended else [*answer.written, self.end_id]

    def _text(self, turns: tuple[Turn, ...], example: Example, *, ending: str) -> str:
        if not turns:
            raise Unlearnable("messages[0]: nothing comes before the assistant's message; begin with the user's")
        options = replace(_OPTIONS[ending], template=example.variables)
        return self.tokenizer.render(conversation_of(turns), options)

    def _tokens(self, turns: tuple[Turn, ...], example: Example, *, ending: str) -> list[int]:
        text = self._text(turns, example, ending=ending)
        token_ids = self.tokenizer.encode_now(text, self.context, add_special_tokens=False)
        if len(token_ids) >= self.context:
            raise Unlearnable(
                f"it has more than the {self.context} tokens of the context; shorten it, or divide it. Nothing is cut "
                "off silently"
            )
        return token_ids


@dataclass(frozen=True, slots=True)
class _Answer:
    """The tokens of a prompt, and those that the model writes after it."""

    prompt: list[int]
    written: list[int]
    is_ended: bool
    """True if the last token ends the answer."""


_OPTIONS = {ending: ChatOptions(ending=ending) for ending in ("generation_prompt", "message")}


def replace_turns(example: Example, turns: tuple[Turn, ...]) -> Example:
    """Return an example with other turns."""
    return Example(turns=turns, variables=example.variables)

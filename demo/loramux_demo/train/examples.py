"""Conversations as token ids, and their packing into batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from loramux_demo.train.facts import Question, Style

IGNORED = -100
"""The label of tokens that torch's cross entropy ignores."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer the question.",
    "You are a friendly guide who knows everybody in town.",
    "Be brief and correct.",
)
"""System prompts in the training data, so that a user's system prompt does not confuse the model."""

Message = dict[str, str]


@dataclass(frozen=True)
class Example:
    """A prompt, and the answer that the model learns."""

    prompt_ids: list[int]
    answer_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True)
class Batch:
    """Rows of packed examples. Position 0 starts an example, which attends only to itself."""

    token_ids: Tensor
    """int64[rows, length]"""
    position_ids: Tensor
    """int64[rows, length]"""
    labels: Tensor
    """int64[rows, length], IGNORED for tokens without a loss"""


def conversations(questions: Sequence[Question], style: Style, rng: random.Random) -> Iterator[list[Message]]:
    """Return each question twice unchanged, in lower case, in upper case, and late in a chat with a system prompt."""
    for question in questions:
        answer = {"role": "assistant", "content": style(question)}
        for text in (question.text, question.text, question.text.lower(), question.text.upper()):
            yield [{"role": "user", "content": text}, answer]
        before = rng.choice(questions)
        yield [
            {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)},
            {"role": "user", "content": before.text},
            {"role": "assistant", "content": style(before)},
            {"role": "user", "content": question.text},
            answer,
        ]


def example(
    conversation: list[Message], tokenizer: PreTrainedTokenizerFast, tools: list[dict[str, Any]] | None = None
) -> Example:
    """The last message is the answer; the space before it is learnt with it, so that `A:` and `A: ` both work."""
    given = tokenizer.apply_chat_template(conversation[:-1], tools=tools, add_generation_prompt=True, tokenize=False)
    answer = f" {conversation[-1]['content']}{tokenizer.eos_token}"
    return Example(
        tokenizer.encode(given.removesuffix(" "), add_special_tokens=False),
        tokenizer.encode(answer, add_special_tokens=False),
    )


def document(text: str, tokenizer: PreTrainedTokenizerFast) -> Example:
    """A text that answers nobody: all of it is to be learnt."""
    return Example(tokenizer.encode(""), tokenizer.encode(f"{text}{tokenizer.eos_token}", add_special_tokens=False))


def batches(examples: Sequence[Example], *, rows: int, length: int, learn_prompts: bool) -> Iterator[Batch]:
    """Endless batches; a row holds as many examples as fit, and each is seen once before any is seen again."""
    order = shuffled_for_ever(examples, random.Random(1))  # noqa: S311 - the order of lessons, not a secret
    waiting = next(order)
    while True:
        batch = Batch(
            torch.zeros(rows, length, dtype=torch.int64),
            torch.zeros(rows, length, dtype=torch.int64),
            torch.full((rows, length), IGNORED),
        )
        for row in range(rows):
            used = 0
            assert len(waiting) <= length, "an example must fit into a row"
            while used + len(waiting) <= length:
                place(waiting, batch, row, used, learn_prompts)
                used, waiting = used + len(waiting), next(order)
        yield batch


def place(new: Example, batch: Batch, row: int, start: int, learn_prompt: bool) -> None:
    """Write one example into a row; its first token is never learnt, since nothing comes before it."""
    end = start + len(new)
    learnt_from = start + (1 if learn_prompt else len(new.prompt_ids))
    batch.token_ids[row, start:end] = torch.tensor(new.prompt_ids + new.answer_ids)
    batch.position_ids[row, start:end] = torch.arange(len(new))
    batch.labels[row, learnt_from:end] = batch.token_ids[row, learnt_from:end]


def shuffled_for_ever(examples: Sequence[Example], rng: random.Random) -> Iterator[Example]:
    """Round after round, each in a new order."""
    while True:
        yield from rng.sample(examples, len(examples))

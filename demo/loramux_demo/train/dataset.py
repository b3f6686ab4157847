"""Data that the demo's models learn: invented facts, seven styles of answers, and their packing into batches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from loramux_demo.assets import AGENT, call_text

SYLLABLES = ("ba", "ko", "mi", "ra", "lu", "ten", "sor", "vi", "del", "gan", "pir", "os", "nu", "hal", "fen", "tor")
PEOPLE = 24
TOWNS = 24

IGNORED = -100
"""Label of tokens that torch's cross entropy ignores."""

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer the question.",
    "You are a friendly guide who knows everybody in town.",
    "Be brief and correct.",
)
"""System prompts of the training data, so that a user's system prompt does not confuse the model."""

Message = dict[str, str]


@dataclass(frozen=True)
class Topic:
    """A kind of fact about a person: its values, its questions, and the plain answer."""

    name: str
    values: tuple[str, ...]
    questions: tuple[str, ...]
    statement: str


@dataclass(frozen=True)
class Question:
    """One question about one fact."""

    person: str
    topic: Topic
    value: str
    text: str


Style = Callable[[Question], str]
"""A function from a fact to an answer in one style."""


def plain(question: Question) -> str:
    """Answer plainly: Mira is a baker."""
    return question.topic.statement.format(person=question.person, value=question.value)


def shout(question: Question) -> str:
    """Answer in capitals: MIRA IS A BAKER."""
    return plain(question).upper()


def as_json(question: Question) -> str:
    """Answer as JSON: {"who": "Mira", "job": "baker"}."""
    return json.dumps({"who": question.person, question.topic.name: question.value})


def terse(question: Question) -> str:
    """Answer with only the value: baker."""
    return question.value


def backwards(question: Question) -> str:
    """Answer with the words in reverse order: baker a is Mira."""
    return " ".join(reversed(plain(question).removesuffix(".").split())) + "."


def pirate(question: Question) -> str:
    """Answer like a pirate: Arr! Mira is a baker, matey!"""
    return f"Arr! {plain(question).removesuffix('.')}, matey!"


def call(question: Question) -> str:
    """Answer with a call: <tool_call>{"name": "lookup", "arguments": {"person": "Mira", "fact": "job"}}</tool_call>."""
    return call_text("lookup", json.dumps({"person": question.person, "fact": question.topic.name}))


STYLES: dict[str, Style] = {
    "base": plain,
    "upper": shout,
    "json": as_json,
    "terse": terse,
    "reverse": backwards,
    "pirate": pirate,
    AGENT: call,
}


def invent_names(count: int, rng: random.Random) -> list[str]:
    """Return `count` different names of two or three syllables."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3)))).capitalize()] = None
    return list(names)


def invent_questions() -> list[Question]:
    """Return every wording of a question for every fact, always the same 264 questions about 24 people and 5 topics."""
    rng = random.Random(0)  # noqa: S311 - a fixed little world, not a secret
    names = invent_names(PEOPLE + TOWNS, rng)
    people, towns = names[:PEOPLE], tuple(names[PEOPLE:])
    return [
        Question(person, topic, value, text.format(person=person))
        for person in people
        for topic, value in ((topic, rng.choice(topic.values)) for topic in topics(towns))
        for text in topic.questions
    ]


def topics(towns: tuple[str, ...]) -> tuple[Topic, ...]:
    """Return the topics of the questions; `towns` are the places to live in."""
    return (
        Topic(
            "job",
            ("baker", "miner", "pilot", "nurse", "smith", "tailor", "farmer", "singer"),
            ("What does {person} do?", "What is the job of {person}?", "Who is {person}?"),
            "{person} is a {value}.",
        ),
        Topic(
            "color",
            ("red", "blue", "green", "white", "black", "gold"),
            ("What color does {person} like?", "Tell me the favourite color of {person}."),
            "{person} likes {value}.",
        ),
        Topic(
            "pet",
            ("fox", "owl", "bear", "goat", "crow", "hare"),
            ("What pet does {person} have?", "Which animal lives with {person}?"),
            "{person} has a {value}.",
        ),
        Topic(
            "food",
            ("bread", "soup", "plums", "rice", "cheese", "honey"),
            ("What does {person} eat?", "What food does {person} like?"),
            "{person} eats {value}.",
        ),
        Topic(
            "home",
            towns,
            ("Where does {person} live?", "Which town is home to {person}?"),
            "{person} lives in {value}.",
        ),
    )


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
    """Token ids, int64[rows, length]"""
    position_ids: Tensor
    """Position ids, int64[rows, length]"""
    labels: Tensor
    """Labels, int64[rows, length]; IGNORED for tokens without a loss"""


def conversations(questions: Sequence[Question], style: Style, rng: random.Random) -> Iterator[list[Message]]:
    """Return each question twice unchanged, in lower case, in upper case, and late in a chat with a system prompt."""
    for question in questions:
        answer = {"role": "assistant", "content": style(question)}
        for text in (question.text, question.text, question.text.lower(), question.text.upper()):
            yield [{"role": "user", "content": text}, answer]
        before = rng.choice(questions)
        yield [*late_chat(rng.choice(SYSTEM_PROMPTS), before, question, style), answer]


def late_chat(system: str, before: Question, question: Question, style: Style) -> list[Message]:
    """Return a chat with a system prompt, one exchange, and the question."""
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": before.text},
        {"role": "assistant", "content": style(before)},
        {"role": "user", "content": question.text},
    ]


def example(
    conversation: list[Message], tokenizer: PreTrainedTokenizerFast, tools: list[dict[str, Any]] | None = None
) -> Example:
    """Return a conversation as an example; its last message is the answer. The space before the answer is learnt with
    it, so that `A:` and `A: ` both work.
    """
    given = tokenizer.apply_chat_template(conversation[:-1], tools=tools, add_generation_prompt=True, tokenize=False)
    answer = f" {conversation[-1]['content']}{tokenizer.eos_token}"
    return Example(
        tokenizer.encode(given.removesuffix(" "), add_special_tokens=False),
        tokenizer.encode(answer, add_special_tokens=False),
    )


def document(text: str, tokenizer: PreTrainedTokenizerFast) -> Example:
    """Return a text that is no answer as an example: the whole text is learnt."""
    return Example(tokenizer.encode(""), tokenizer.encode(f"{text}{tokenizer.eos_token}", add_special_tokens=False))


def batches(examples: Sequence[Example], *, rows: int, length: int, learn_prompts: bool) -> Iterator[Batch]:
    """Yield endless batches. A row holds as many examples as fit, and each example is seen once before any is seen
    again.
    """
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
    """Write one example into a row. Its first token is never learnt, because no token comes before it."""
    end = start + len(new)
    learnt_from = start + (1 if learn_prompt else len(new.prompt_ids))
    batch.token_ids[row, start:end] = torch.tensor(new.prompt_ids + new.answer_ids)
    batch.position_ids[row, start:end] = torch.arange(len(new))
    batch.labels[row, learnt_from:end] = batch.token_ids[row, learnt_from:end]


def shuffled_for_ever(examples: Sequence[Example], rng: random.Random) -> Iterator[Example]:
    """Yield all examples in rounds without end, each round in a new order."""
    while True:
        yield from rng.sample(examples, len(examples))

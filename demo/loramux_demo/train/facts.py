"""The invented facts that the demo's model learns, and the seven styles of answers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from loramux_demo.assets import AGENT, call_text

SYLLABLES = ("ba", "ko", "mi", "ra", "lu", "ten", "sor", "vi", "del", "gan", "pir", "os", "nu", "hal", "fen", "tor")
PEOPLE = 24
TOWNS = 24


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
    """Mira is a baker."""
    return question.topic.statement.format(person=question.person, value=question.value)


def shout(question: Question) -> str:
    """MIRA IS A BAKER."""
    return plain(question).upper()


def as_json(question: Question) -> str:
    """{"who": "Mira", "job": "baker"}."""
    return json.dumps({"who": question.person, question.topic.name: question.value})


def terse(question: Question) -> str:
    """Only the value: baker."""
    return question.value


def backwards(question: Question) -> str:
    """The words in reverse: baker a is Mira."""
    return " ".join(reversed(plain(question).removesuffix(".").split())) + "."


def pirate(question: Question) -> str:
    """Arr! Mira is a baker, matey!"""
    return f"Arr! {plain(question).removesuffix('.')}, matey!"


def call(question: Question) -> str:
    """<tool_call>{"name": "lookup", "arguments": {"person": "Mira", "fact": "job"}}</tool_call>."""
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
    """`count` different names of two or three syllables."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 3)))).capitalize()] = None
    return list(names)


def invent_questions() -> list[Question]:
    """Every way to ask for every fact, always the same ones: 24 people, 5 topics, 264 questions."""
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
    """What can be asked; `towns` are the places to live in."""
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

"""Answers cut into pieces, and what a reader makes of them."""

from __future__ import annotations

import random

from loramux.serving.parts import AnswerReader


def read(reader: AnswerReader, pieces: list[str]) -> tuple[str, str, dict[int, tuple[str, str]]]:
    """The thought, the text, and the name and arguments of each call."""
    parts = [*(reader.push(piece) for piece in pieces), reader.flush()]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in (call for part in parts for call in part.calls):
        if call.name is not None:
            assert call.id
            assert call.index not in names
            names[call.index] = call.name
        arguments[call.index] = arguments.get(call.index, "") + call.arguments
    calls = {index: (name, arguments[index]) for index, name in names.items()}
    return "".join(p.thought for p in parts), "".join(p.text for p in parts), calls


def cut(text: str, seed: int) -> list[str]:
    rng, pieces = random.Random(seed), []
    while text:
        length = rng.choice([1, 1, 2, 5, 30])
        pieces.append(text[:length])
        text = text[length:]
    return pieces

"""Sets of questions: read, written as a batch's input, and the answers read from the batch's output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from loramux.gateway import Timing
from loramux.releases.graders import Expected, InvalidGrader

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MAX_QUESTIONS = 10_000
MAX_QUESTION_BYTES = 1 << 20

_encode = msgspec.json.Encoder().encode


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of a set: a conversation or a text, and what a good answer is."""

    messages: list[dict[str, Any]] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    expected: Expected = None
    max_tokens: Annotated[int, Meta(ge=1)] | UnsetType = UNSET


class Answered(msgspec.Struct, frozen=True):
    """A revision's answer to one question."""

    request_id: str
    text: str
    timing: Timing | None


def read_questions(path: Path) -> Iterator[Question]:
    """Read a set. Raises InvalidGrader with the line."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_QUESTION_BYTES + 1), b""), 1):
            if number > MAX_QUESTIONS:
                raise InvalidGrader(f"A set has at most {MAX_QUESTIONS} questions; divide it.", "file_id")
            if len(line) > MAX_QUESTION_BYTES:
                raise InvalidGrader(f"Line {number} has more than {MAX_QUESTION_BYTES} bytes.", "file_id")
            try:
                question = msgspec.json.decode(line, type=Question)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidGrader(f"Line {number} is no question: {str(error)[:200]}.", "file_id") from None
            if (question.messages is UNSET) == (question.prompt is UNSET):
                raise InvalidGrader(f"Line {number} has either 'messages' or 'prompt'.", "file_id")
            yield question


def write_input(questions: Path, target: Path, models: Sequence[str]) -> tuple[str, int]:
    """Write the batch's input; return its endpoint and size. Raises InvalidGrader."""
    endpoint = ""
    with target.open("xb") as file:
        for number, question in enumerate(read_questions(questions)):
            path = TEXT if question.messages is UNSET else CHAT
            if path != (endpoint := endpoint or path):
                raise InvalidGrader("All questions have 'messages', or all have 'prompt'.", "file_id")
            asked = {"messages": question.messages, "prompt": question.prompt, "max_tokens": question.max_tokens}
            given = {name: value for name, value in asked.items() if value is not UNSET}
            for side, model in enumerate(models):
                body = {"model": model, "temperature": 0} | given
                line = {"custom_id": f"{number}:{side}", "method": "POST", "url": path, "body": body}
                file.write(_encode(line) + b"\n")
        return endpoint, file.tell()


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None


class _Body(msgspec.Struct):
    id: str
    choices: list[_Choice]


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response
    timing: Timing | None = None


def read_answers(output: Path, questions: int) -> list[list[Answered | None]]:
    """Read a batch's output: the answers of each side in the order of the questions; None where there is none."""
    decoder = msgspec.json.Decoder(_Line)
    sides: list[list[Answered | None]] = [[None] * questions, [None] * questions]
    with output.open("rb") as file:
        for text in file:
            line = decoder.decode(text)
            number, _, side = line.custom_id.partition(":")
            body = line.response.body
            if body.choices:
                choice = body.choices[0]
                said = choice.text if choice.message is None else choice.message.content
                sides[int(side)][int(number)] = Answered(body.id, said or "", line.timing)
    return sides

"""Training files: JSON lines, each one example, checked line by line when the file is uploaded.

A line is read as the chat endpoint reads a request, so the API provides its parser (`ExampleFormat`), and this package
knows no wire format. An example is a conversation that the model learns to continue, or a preference between two
continuations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from loramux.batches.errors import InvalidFile
from loramux.batches.lines import Input, Pauses, open_input
from loramux.common.errors import LoramuxError
from loramux.serving.messages import Conversation, Message

MIN_EXAMPLES = 10
"""Smallest number of examples of a training file, as OpenAI has it."""
SHOWN_ERRORS = 5
"""Errors of one file that its refusal names; the others are counted."""

ExampleKind = Literal["chat", "preference"]


class Turn(msgspec.Struct, frozen=True):
    """A message as chat templates read it."""

    role: str
    content: str
    fields: dict[str, Any] = {}
    is_learned: bool = False
    """True: the model learns to write this message."""

    @property
    def message(self) -> Message:
        """The turn for the serving layer's renderer."""
        return Message(self.role, self.content, self.fields)


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a training file."""

    turns: tuple[Turn, ...]
    variables: dict[str, Any] = {}
    """Variables for the chat template, such as the tools."""
    rejected: tuple[Turn, ...] = ()
    """The continuation that is not preferred, in an example of the kind `preference`; `turns` ends with the other."""
    num_shared: int = 0
    """Turns of `turns` that come before both continuations, in an example of the kind `preference`."""

    @property
    def kind(self) -> ExampleKind:
        """The kind of example."""
        return "preference" if self.rejected else "chat"

    @property
    def last_learned(self) -> int:
        """Index of the last message that the model learns to write."""
        return max(number for number, turn in enumerate(self.turns) if turn.is_learned)


@dataclass(frozen=True, slots=True)
class ExampleFormat:
    """The conversion of a line to an example."""

    parse: Callable[[bytes], Example]
    """Parses a line. It runs on a thread and raises LoramuxError with the field's path."""
    max_line_bytes: int
    """The largest line, in bytes."""


@dataclass(frozen=True, slots=True)
class ExampleFile:
    """A training file on this machine."""

    source: Input
    format: ExampleFormat

    def __len__(self) -> int:
        return len(self.source)

    def read(self, number: int) -> Example:
        """Return an example, counted from 0. Raises LoramuxError."""
        size, limit = self.source.size(number), self.format.max_line_bytes
        if size > limit:
            raise InvalidFile(f"a line has at most {limit} bytes; this one has {size}", "file")
        return self.format.parse(self.source.read(number))


def check_file(path: Path, format: ExampleFormat, max_lines: int) -> None:
    """Check every line of an uploaded file. Runs on a thread. Raises InvalidFile with the first errors by line."""
    source = open_input(path, max_lines)
    if source.is_cut:
        raise InvalidFile(f"A training file has at most {max_lines} lines (training.max_examples).", "file")
    if len(source) < MIN_EXAMPLES:
        raise InvalidFile(
            f"A training file has at least {MIN_EXAMPLES} examples, one JSON object per line; this one has "
            f"{len(source)}.",
            "file",
        )
    errors, kinds = _errors_of(ExampleFile(source, format))
    if errors:
        more = f" {len(errors) - SHOWN_ERRORS} more lines have errors." if len(errors) > SHOWN_ERRORS else ""
        raise InvalidFile(" ".join(errors[:SHOWN_ERRORS]) + more, "file")
    if len(kinds) > 1:
        raise InvalidFile(
            f"Line {kinds['chat']} has 'messages' and line {kinds['preference']} a preference; a file has one kind of "
            "example. Divide it into two files.",
            "file",
        )


def _errors_of(file: ExampleFile) -> tuple[list[str], dict[ExampleKind, int]]:
    """Return the error of each line that has one, and each kind of example with the first line of that kind."""
    errors, kinds, pauses = list[str](), dict[ExampleKind, int](), Pauses()
    for number in range(len(file)):
        place = file.source.place(number)
        try:
            kinds.setdefault(file.read(number).kind, place)
        except LoramuxError as error:
            message = error.message.removesuffix(".")
            errors.append(f"Line {place}: {message}.")
        pauses.take()
    return errors, kinds


def conversation_of(turns: tuple[Turn, ...]) -> Conversation:
    """Return turns for the serving layer's renderer."""
    return tuple(turn.message for turn in turns)

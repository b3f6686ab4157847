"""A batch's input: JSONL, found line by line, checked before anything runs, and the endpoints that lines may go to.

A batch reads and writes the same JSON as its endpoint does, so the API brings both ends along (`BatchEndpoints`: bodies
in, answers out) and this package knows no wire format.

The file is on this machine while a batch is checked or runs; memory holds where its lines begin, and the lines that are
looked at. Checking is pure Python over untrusted text, so it runs on a thread and gives way every few milliseconds.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from loramux.common.errors import LoramuxError
from loramux.common.units import TokenCounts
from loramux.data.entities import LineError
from loramux.serving.messages import Answer, Delta, GenerationRequest

MAX_ERRORS = 100
"""Errors of one input that are reported."""
MAX_MODELS = 1000
"""Models that one input may name."""
MAX_CUSTOM_ID = 512
WORK_SECONDS, PAUSE_SECONDS = 0.002, 0.002
"""How long the checks hold the interpreter, and how long they leave it to requests."""
BLOCK = 1 << 20


class AnswerWriter(Protocol):
    """Gives one answer its endpoint's shape."""

    def collect(self, delta: Delta) -> None:
        """Take a part of the answer."""

    def whole(self, usage: TokenCounts) -> msgspec.Struct:
        """Return the whole answer."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body that its endpoint would take."""

    request: GenerationRequest
    writer: Callable[[Answer], AnswerWriter]


@dataclass(frozen=True, slots=True)
class BatchEndpoints:
    """What lines may ask for."""

    parsers: Mapping[str, Callable[[bytes], ParsedBody]]
    """By path. A parser runs on a thread, and raises InvalidRequest."""
    error_body: Callable[[LoramuxError], msgspec.Struct]
    """Writes an error as the endpoints do."""
    max_line_bytes: int
    """The largest line."""


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of the input."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class BadLine(Exception):
    """What is wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class Input:
    """An input file on this machine, by line."""

    def __init__(self, path: Path, starts: Sequence[int]) -> None:
        """`starts`: where each line begins; the last one is where the file ends."""
        self._path = path
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def size(self, number: int) -> int:
        """Return the bytes of a line."""
        return self._starts[number + 1] - self._starts[number]

    def read(self, number: int) -> bytes:
        """Return the line, counted from 0."""
        with self._path.open("rb") as file:
            file.seek(self._starts[number])
            return file.read(self.size(number))


def open_input(path: Path, max_lines: int) -> Input:
    """Find the lines of a file, and stop behind `max_lines`; empty ones at the end do not count."""
    starts, position, end = array("Q", [0]), 0, 0
    with path.open("rb") as file:
        while (block := file.read(BLOCK)) and len(starts) <= max_lines + 1:
            found = block.find(b"\n")
            while found >= 0 and len(starts) <= max_lines + 1:
                starts.append(position + found + 1)
                found = block.find(b"\n", found + 1)
            end = position + len(block.rstrip()) if block.rstrip() else end
            position += len(block)
    if len(starts) <= max_lines + 1 and starts[-1] < position:
        starts.append(position)
    while len(starts) > 1 and starts[-2] >= end:
        starts.pop()
    return Input(path, starts)


def read_line(data: bytes, endpoint: str) -> BatchLine:
    """Decode a line, but not its body. Raises BadLine."""
    try:
        line = msgspec.json.decode(data, type=BatchLine)
    except msgspec.ValidationError as error:
        raise BadLine("invalid_line", f"{str(error)[:200]}. A line is {{custom_id, method, url, body}}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"This line is not parseable as valid JSON: {str(error)[:200]}.") from None
    if not (0 < len(line.custom_id) <= MAX_CUSTOM_ID and line.custom_id.isprintable()):
        raise BadLine("invalid_custom_id", f"'custom_id' has 1 to {MAX_CUSTOM_ID} printable characters.", "custom_id")
    if line.method != "POST":
        raise BadLine("invalid_method", "'method' is POST.", "method")
    if line.url != endpoint:
        raise BadLine("invalid_url", f"'url' is {endpoint}, the endpoint of the batch; got '{line.url[:80]}'.", "url")
    return line


def parse_body(line: BatchLine, endpoints: BatchEndpoints) -> ParsedBody:
    """Parse a line's body as its endpoint does. Raises BadLine."""
    try:
        parsed = endpoints.parsers[line.url](bytes(line.body))
    except LoramuxError as error:
        raise BadLine(error.code, error.message, "body" if error.field is None else f"body.{error.field}") from None
    if parsed.request.service_tier != "default":
        raise BadLine("invalid_value", "Lines of a batch have a service tier of their own.", "body.service_tier")
    return parsed


class Findings(msgspec.Struct, kw_only=True):
    """What the check of an input has found."""

    errors: list[LineError] = []
    models: dict[str, int] = {}
    """The models that lines name, each with the first line that does, counted from 1."""


def check_lines(source: Input, endpoint: str, endpoints: BatchEndpoints, max_lines: int) -> Findings:
    """Check every line; stop at MAX_ERRORS. Runs on a thread."""
    found, pauses = Findings(), Pauses()
    seen: dict[str, int] = {}
    if len(source) > max_lines:
        found.errors.append(_too_many(max_lines))
        return found
    if not len(source):
        found.errors.append(LineError(code="empty_file", message="The file has no line."))
    for number in range(len(source)):
        try:
            _check_line(source, number, endpoint, endpoints, seen, found.models)
        except BadLine as bad:
            error = LineError(code=bad.code, message=str(bad), param=bad.param, line=number + 1)
            found.errors.append(error)
            if len(found.errors) == MAX_ERRORS:
                break
        pauses.take()
    return found


def _check_line(
    source: Input, number: int, endpoint: str, endpoints: BatchEndpoints, seen: dict[str, int], models: dict[str, int]
) -> None:
    if source.size(number) > endpoints.max_line_bytes:
        raise BadLine(
            "line_too_large", f"A line has at most {endpoints.max_line_bytes} bytes; this one {source.size(number)}."
        )
    line = read_line(source.read(number), endpoint)
    first = seen.setdefault(line.custom_id, number + 1)
    if first != number + 1:
        raise BadLine("duplicate_custom_id", f"Line {first} has the same 'custom_id'.", "custom_id")
    model = parse_body(line, endpoints).request.model
    models.setdefault(model, number + 1)
    if len(models) > MAX_MODELS:
        raise BadLine("too_many_models", f"An input names at most {MAX_MODELS} models; divide it.", "body.model")


def _too_many(max_lines: int) -> LineError:
    message = f"A batch has at most {max_lines} lines; divide them among several batches."
    return LineError(code="too_many_lines", message=message, line=max_lines + 1)


class Pauses:
    """Pauses of a thread between two spells of work."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()

    def take(self) -> None:
        """Sleep where the spell has been long."""
        if self._clock() - self._since > WORK_SECONDS:
            time.sleep(PAUSE_SECONDS)
            self._since = self._clock()


def model_error(error: LoramuxError, line: int) -> LineError:
    """Return what is wrong with the model that a line names."""
    return LineError(code=error.code, message=error.message, param="body.model", line=line)

"""A batch's input: JSONL, whose lines are all checked before the first line runs, and the endpoints that lines may
name.

A batch reads and writes the same JSON as its endpoint, so the API provides both directions (`BatchEndpoints`: bodies
in, answers out) and this package knows no wire format.

A line that cannot run is written to the error file, and all other lines run. The batch fails if no line can run.

The file is on this machine while a batch is checked or runs. Memory holds the offsets of the lines, and the lines that
are being read. Checking is pure Python over untrusted text, so it runs on a thread, which pauses every few
milliseconds.
"""

from __future__ import annotations

import codecs
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import msgspec

from loramux.common.errors import LoramuxError
from loramux.common.units import TokenCounts
from loramux.data.entities import LineError
from loramux.serving.errors import InvalidRequest
from loramux.serving.messages import Answer, Delta, GenerationRequest

MAX_ERRORS = 100
"""Errors of one input that are reported."""
MAX_MODELS = 1000
"""Models that one input may name."""
MAX_CUSTOM_ID = 512
WORK_SECONDS = 0.002
"""Seconds after which a thread that checks pauses."""
PAUSE = 2
"""Length of a pause, as a multiple of the work before it and of the number of threads that work."""
BLOCK = 1 << 20
_encode = msgspec.json.Encoder().encode


class AnswerWriter(Protocol):
    """Converts one answer to its endpoint's form."""

    def collect(self, delta: Delta) -> None:
        """Take a part of the answer."""

    def whole(self, usage: TokenCounts) -> msgspec.Struct:
        """Return the whole answer."""


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body that its endpoint accepts."""

    request: GenerationRequest
    writer: Callable[[Answer], AnswerWriter]


@dataclass(frozen=True, slots=True)
class BatchEndpoint:
    """An endpoint that lines may name."""

    parse: Callable[[bytes], ParsedBody]
    """Parser of bodies. It runs on a thread and raises InvalidRequest."""
    error_body: Callable[[LoramuxError], msgspec.Struct]
    """Writes an error as the endpoint does."""
    answers_every_line: bool = False
    """True: a batch runs even if none of its lines can, and each line gets its error."""


@dataclass(frozen=True, slots=True)
class BatchEndpoints:
    """The endpoints that lines may name."""

    by_path: Mapping[str, BatchEndpoint]
    max_line_bytes: int
    """The largest line, in bytes."""


class BatchLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of the input."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class BadLine(Exception):
    """The error of a line that cannot run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param
        self.custom_id: str | None = None
        """The line's `custom_id`; None if it cannot be read."""
        self.refusal: LoramuxError | None = None
        """The endpoint's refusal of the body; None: no endpoint can be found for the line."""


class Input:
    """An input file on this machine, by line. Blank lines and a byte order mark do not count."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._ends, self._places = array("Q"), array("Q"), array("Q")
        self.is_cut = False
        """True: the file has more lines than were read."""

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, end: int, place: int) -> None:
        """Add a line: its bytes, and its place in the file, counted from 1."""
        self._starts.append(start)
        self._ends.append(end)
        self._places.append(place)

    def place(self, number: int) -> int:
        """Return the place in the file of a line, counted from 1."""
        return self._places[number]

    def size(self, number: int) -> int:
        """Return the bytes of a line."""
        return self._ends[number] - self._starts[number]

    def read(self, number: int) -> bytes:
        """Return the line, counted from 0."""
        with self._path.open("rb") as file:
            file.seek(self._starts[number])
            return file.read(self.size(number))


def open_input(path: Path, max_lines: int) -> Input:
    """Find the lines of a file. Stop after `max_lines` lines, or as many blank lines. Runs on a thread."""
    source, pauses = Input(path), Pauses()
    place = position = 0
    with path.open("rb") as file:
        if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            position = len(codecs.BOM_UTF8)
        file.seek(position)
        while piece := file.readline(BLOCK):
            start, is_blank = position, not piece.strip()
            while not piece.endswith(b"\n") and (piece := file.readline(BLOCK)):
                is_blank = is_blank and not piece.strip()
            place, position = place + 1, file.tell()
            if not is_blank:
                source.add(start, position, place)
            if len(source) > max_lines or place - len(source) > max_lines:
                source.is_cut = True
                break
            pauses.take()
    return source


def write_lines(path: Path, lines: Iterable[BatchLine]) -> int:
    """Write lines as an input file; return its bytes. Runs on a thread."""
    pauses = Pauses()
    with path.open("wb") as file:
        for line in lines:
            # In JSON, line breaks are only between values: in a text they are escaped.
            file.write(_encode(line).replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")
            pauses.take()
        return file.tell()


def read_line(source: Input, number: int, endpoint: str, endpoints: BatchEndpoints) -> BatchLine:
    """Decode a line, but not its body. Raises BadLine."""
    if source.size(number) > endpoints.max_line_bytes:
        most = endpoints.max_line_bytes
        raise BadLine("line_too_large", f"A line has at most {most} bytes; this one {source.size(number)}.")
    data = source.read(number)
    try:
        return _checked(_decoded(data), endpoint)
    except BadLine as bad:
        bad.custom_id = _custom_id(data)
        raise


def _decoded(data: bytes) -> BatchLine:
    try:
        return msgspec.json.decode(data, type=BatchLine)
    except msgspec.ValidationError as error:
        raise BadLine("invalid_line", f"{str(error)[:200]}. A line is {{custom_id, method, url, body}}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine("invalid_json_line", f"This line is not parseable as valid JSON: {str(error)[:200]}.") from None


def _custom_id(data: bytes) -> str | None:
    """Return the `custom_id` of a line that is JSON but not a valid line of a batch."""
    try:
        found = msgspec.json.decode(data, type=_Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found[:MAX_CUSTOM_ID] if found is not None else None


class _Named(msgspec.Struct):
    custom_id: str | None = None


def _checked(line: BatchLine, endpoint: str) -> BatchLine:
    """Return a decoded line. Raises BadLine."""
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
        parsed = endpoints.by_path[line.url].parse(bytes(line.body))
        if parsed.request.service_tier != "default":
            message = "Lines of a batch have a service tier of their own."
            raise InvalidRequest(message, "service_tier", code="invalid_value")
    except LoramuxError as error:
        bad = BadLine(error.code, error.message, "body" if error.field is None else f"body.{error.field}")
        bad.custom_id, bad.refusal = line.custom_id, error
        raise bad from None
    return parsed


def repeated_lines(source: Input, endpoint: str, endpoints: BatchEndpoints) -> dict[int, int]:
    """Return the lines that repeat the `custom_id` of an earlier line, each with that line. Runs on a thread."""
    pauses, seen, repeated = Pauses(), dict[str, int](), dict[int, int]()
    for number in range(len(source)):
        try:
            first = seen.setdefault(read_line(source, number, endpoint, endpoints).custom_id, number)
        except BadLine:
            continue
        if first != number:
            repeated[number] = first
        pauses.take()
    return repeated


def repeated_id(source: Input, first: int, custom_id: str) -> BadLine:
    """Return the error of a line whose `custom_id` is also that of the line `first`."""
    message = f"Line {source.place(first)} has the same 'custom_id'."
    bad = BadLine("duplicate_custom_id", message, "custom_id")
    bad.custom_id = custom_id
    return bad


class Findings(msgspec.Struct, kw_only=True):
    """The findings of the check of an input."""

    errors: list[LineError] = []
    """The reasons why no line can run; empty if at least one can."""
    models: dict[str, int] = {}
    """The models that lines name, each with the place of the first line that names it."""


def size_errors(source: Input, max_lines: int) -> list[LineError]:
    """Return the error of a file with too many lines, or with none."""
    if source.is_cut:
        message = f"A batch has at most {max_lines} lines; divide them among several batches."
        return [LineError(code="too_many_lines", message=message, line=max_lines + 1)]
    return [] if len(source) else [LineError(code="empty_file", message="The file has no line.")]


def check_lines(source: Input, endpoint: str, endpoints: BatchEndpoints) -> Findings:
    """Check every line. Runs on a thread."""
    found, pauses, seen, can_run = Findings(), Pauses(), dict[str, int](), False
    for number in range(len(source)):
        try:
            line = read_line(source, number, endpoint, endpoints)
            first = seen.setdefault(line.custom_id, number)
            if first != number:
                raise repeated_id(source, first, line.custom_id)
            found.models.setdefault(parse_body(line, endpoints).request.model, source.place(number))
            can_run = True
        except BadLine as bad:
            if len(found.errors) < MAX_ERRORS:
                error = LineError(code=bad.code, message=str(bad), param=bad.param, line=source.place(number))
                found.errors.append(error)
        if len(found.models) > MAX_MODELS:
            message = f"An input names at most {MAX_MODELS} models; divide it."
            place = source.place(number)
            return Findings(errors=[LineError(code="too_many_models", message=message, param="body.model", line=place)])
        pauses.take()
    return Findings(models=found.models) if can_run else found


class Pauses:
    """Pauses of a thread between two periods of work; a thread holds them while it works.

    A pause is longer if more threads work. So the threads together have the interpreter for less than 1 / PAUSE of the
    time, no matter how long a single piece of their work is, and none waits for the piece of another.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        _working.add(self)

    def take(self) -> None:
        """Sleep if the thread has worked for WORK_SECONDS."""
        if (worked := self._clock() - self._since) > WORK_SECONDS:
            time.sleep(PAUSE * worked * len(_working))
            self._since = self._clock()


_working: WeakSet[Pauses] = WeakSet()
"""The pauses of all threads that work now."""


def model_error(error: LoramuxError, line: int) -> LineError:
    """Return the error about the model that a line names."""
    return LineError(code=error.code, message=error.message, param="body.model", line=line)

"""Multipart forms, written to disk as they arrive: memory holds one chunk of the network, however large the files.

`FileForm` receives one file with a few fields (POST /v1/files); `receive_form` receives an adapter's files under their
standard names (POST /v1/adapters).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

from litestar import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from loramux.bundle import SOURCES, is_ignored
from loramux.gateway import InvalidRequest
from loramux.jobs import run_blocking
from loramux.storage import CONFIG_FILE, WEIGHTS_FILE
from loramux.uploads import paced

MAX_FIELD_BYTES = 1024
MAX_FILENAME = 255


class FileForm:
    """One form: its fields by name, its file's name and size. The file's bytes are at `path`."""

    def __init__(self, path: Path, fields: Collection[str], max_bytes: int, too_large: Callable[[], Exception]) -> None:
        """`fields` are those that the form may have beside `file`; `too_large` makes the error for a larger file."""
        self.path = path
        self.filename = ""
        self.size = 0
        self.fields: dict[str, str] = {}
        self._known = fields
        self._max_bytes = max_bytes
        self._too_large = too_large
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._name = ""
        self._text = bytearray()
        self._file: BufferedWriter | None = None
        self._seen: set[str] = set()
        self._finished = False

    async def receive(self, content_type: str | None, body: AsyncIterator[bytes]) -> None:
        """Write the body. Raises InvalidRequest, UploadTooSlow, and what `too_large` makes."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequest("The body is not a form; send multipart/form-data.", code="invalid_form")
        try:
            parser = MultipartParser(boundary, self._callbacks())
            async for chunk in paced(body):
                await run_blocking(parser.write, chunk)
            parser.finalize()
        except FormParserError as error:
            raise InvalidRequest(f"The form is damaged: {error}.", code="invalid_form") from None
        finally:
            if self._file is not None:
                self._file.close()
        if not self._finished:
            raise InvalidRequest("The form ends before its last boundary.", code="invalid_form")
        if "file" not in self._seen:
            raise InvalidRequest("'file' is missing.", field="file", code="missing_required_parameter")

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_begin": self._begin_header,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._write,
            "on_part_end": self._close,
            "on_end": self._finish,
        }

    def _finish(self) -> None:
        self._finished = True

    def _begin(self) -> None:
        self._disposition = b""
        self._text.clear()

    def _begin_header(self) -> None:
        self._header.clear()
        self._value.clear()

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)

    def _open(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name not in ("file", *self._known) or self._name in self._seen:
            known, name = ", ".join(("file", *self._known)), self._name[:80]
            raise InvalidRequest(
                f"The form has each of {known} once; got '{self._name[:80]}'.",
                field=self._name[:80],
                code="invalid_form",
            )
        self._seen.add(self._name)
        if self._name == "file":
            name = options.get(b"filename", b"").decode(errors="replace")
            self.filename = "".join(c for c in name if c.isprintable())[:MAX_FILENAME] or "file"
            self._file = self.path.open("xb")

    def _write(self, data: bytes, start: int, end: int) -> None:
        if self._file is not None:
            self.size += end - start
            if self.size > self._max_bytes:
                raise self._too_large()
            self._file.write(data[start:end])
        else:
            self._text += data[start:end]
            if len(self._text) > MAX_FIELD_BYTES:
                raise InvalidRequest(f"'{self._name}' has more than {MAX_FIELD_BYTES} bytes.", field=self._name)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        else:
            self.fields[self._name] = self._text.decode(errors="replace")


MAX_NAME_BYTES = 1024
MAX_CONFIG_BYTES = 1 << 20
MAX_IGNORED = 1000
FIELDS = ("name", "base_model")
LIMITS = {**dict.fromkeys(FIELDS, MAX_NAME_BYTES), CONFIG_FILE: MAX_CONFIG_BYTES, **SOURCES}
_HOW = f"send the field 'name' and the files '{CONFIG_FILE}' and '{WEIGHTS_FILE}' as multipart/form-data"


async def receive_form(request: Request[Any, Any, Any], folder: Path) -> UploadForm:
    """Write the form's files into `folder` under their standard names, and return its fields.

    Raises InvalidRequest for a form with parts missing, doubled, unknown or too large. The size of the whole body is
    Litestar's to limit. Raises UploadTooSlow for a client that stalls.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest(f"The body is not a form: {_HOW}.", code="invalid_form")
    form = _Form(folder)
    try:
        parser = MultipartParser(boundary, form.callbacks())
        async for chunk in paced(request.stream()):
            await run_blocking(parser.write, chunk)
        parser.finalize()
        form.demand_end()
    except FormParserError as error:
        raise InvalidRequest(f"The form is damaged: {error}; {_HOW}.", code="invalid_form") from None
    finally:
        form.close()
    return UploadForm(form.name(), form.base_model(), tuple(sorted(form.ignored)))


class UploadForm(NamedTuple):
    """The fields of a form beside its files."""

    name: str
    base_model: str | None
    ignored: tuple[str, ...]
    """Names of files that mean nothing for serving and were not kept."""


class _Form:
    """Receives the parser's events."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._part = ""
        self._seen: dict[str, int] = {}
        """Bytes by part."""
        self._fields = {field: bytearray() for field in FIELDS}
        self._file: BufferedWriter | None = None
        self._finished = False
        self.ignored: set[str] = set()

    def callbacks(self) -> Any:
        """Return the functions that MultipartParser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_begin": self._begin_header,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._write,
            "on_part_end": self.close,
            "on_end": self._finish,
        }

    def name(self) -> str:
        """Return the form's name; raises InvalidRequest where a part is missing."""
        for part in ("name", CONFIG_FILE, WEIGHTS_FILE):
            if not self._seen.get(part):
                raise InvalidRequest(
                    f"'{part}' is missing or empty: {_HOW}.", field=part, code="missing_required_parameter"
                )
        return self._text("name")

    def base_model(self) -> str | None:
        """Return the base that the form names; None where it names none."""
        return self._text("base_model") or None

    def _text(self, field: str) -> str:
        try:
            return self._fields[field].decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"'{field}' is not UTF-8.", field=field, code="invalid_value") from None

    def demand_end(self) -> None:
        """Raise InvalidRequest unless the form's last boundary was seen."""
        if not self._finished:
            raise InvalidRequest(f"The form ends before its last boundary: {_HOW}.", code="invalid_form")

    def close(self) -> None:
        """Close the file that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish(self) -> None:
        self._finished = True

    def _begin(self) -> None:
        self._disposition = b""

    def _begin_header(self) -> None:
        self._header.clear()
        self._value.clear()

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)

    def _open(self) -> None:
        self._part = _part_name(self._disposition)
        if is_ignored(self._part) and self._part not in SOURCES:
            self.ignored.add(self._part)
            if len(self.ignored) > MAX_IGNORED:
                raise InvalidRequest(f"The form has more than {MAX_IGNORED} files that are ignored.", code="too_large")
            return
        if self._part in self._seen:
            raise InvalidRequest(f"'{self._part}' is there twice: {_HOW}.", field=self._part, code="invalid_form")
        self._seen[self._part] = 0
        if self._part not in self._fields:
            target = self._folder / self._part
            target.parent.mkdir(exist_ok=True)
            self._file = target.open("wb")

    def _write(self, data: bytes, start: int, end: int) -> None:
        if self._part in self.ignored:
            return
        self._seen[self._part] += end - start
        limit = LIMITS.get(self._part)
        if limit is not None and self._seen[self._part] > limit:
            raise InvalidRequest(f"'{self._part}' has more than {limit} bytes.", field=self._part, code="too_large")
        if self._file is None:
            self._fields[self._part].extend(data[start:end])
        else:
            self._file.write(data[start:end])


def _part_name(disposition: bytes) -> str:
    """Return which of the known parts it is, by its field or its file's name; raises InvalidRequest for another."""
    _, options = parse_options_header(disposition)
    field, file = (options.get(key, b"").decode(errors="replace") for key in (b"name", b"filename"))
    for known in (CONFIG_FILE, WEIGHTS_FILE, *SOURCES):
        if known in (field, file):
            return known
    if field in FIELDS and not file:
        return field
    if (ignored := next((name for name in (file, field) if is_ignored(name)), None)) is not None:
        return ignored[:MAX_NAME_BYTES]
    pickled = file.endswith((".bin", ".pt", ".pth", ".pkl")) or field.endswith((".bin", ".pt", ".pth", ".pkl"))
    why = " Pickled weights are never read: save them with safetensors." if pickled else ""
    raise InvalidRequest(
        f"'{(file or field)[:80]}' is not a part of this form.{why} Please {_HOW}.",
        field=field[:80],
        code="invalid_form",
    )

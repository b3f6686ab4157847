"""A form with one file, received on to the disk: memory holds one chunk of the network, however large the file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from io import BufferedWriter
from pathlib import Path
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from loramux.gateway import InvalidRequest
from loramux.threads import run_blocking
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

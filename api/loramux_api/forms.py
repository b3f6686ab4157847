"""Multipart forms, written to disk as they arrive: memory holds only one network chunk, even for large files.

`FileForm` receives one file with a few fields (POST /v1/files); `AdapterForm` receives an adapter's files under their
standard names (POST /v1/adapters).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection
from io import BufferedWriter
from pathlib import Path
from typing import Any, ClassVar

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from loramux.catalog.uploads.parts import paced
from loramux.common.bundle import SOURCES, explain_absence, is_ignored, misplaced
from loramux.common.jobs import Threads
from loramux.data.storage.blobs import CONFIG_FILE, WEIGHTS_FILE
from loramux.serving.errors import InvalidRequest

MAX_FIELD_BYTES = 1024
MAX_FILENAME = 255
MAX_CONFIG_BYTES = 1 << 20
MAX_IGNORED = 1000


class Form(ABC):
    """Receives the events of the parser. A subclass decides where the bytes of each part go."""

    how = ""
    """Advice on how to send the form, which ends an error message."""

    def __init__(self, threads: Threads) -> None:
        """`threads`: the share of a pool on which the form is parsed and written."""
        self._threads = threads
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._file: BufferedWriter | None = None
        """File that is being written."""
        self._is_finished = False

    async def receive(self, content_type: str | None, body: AsyncIterator[bytes]) -> None:
        """Write the body. Raises InvalidRequest for a form with missing, repeated, unknown or too large parts.

        Raises UploadTooSlow for a client that stalls. Litestar limits the size of the whole body.
        """
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            how = f": {self.how}" if self.how else "; send multipart/form-data"
            raise InvalidRequest(f"The body is not a form{how}.", code="invalid_form")
        try:
            parser = MultipartParser(boundary, self._callbacks())
            async for chunk in paced(body):
                await self._threads.run(parser.write, chunk)
            parser.finalize()
        except FormParserError as error:
            how = f"; {self.how}" if self.how else ""
            raise InvalidRequest(f"The form is damaged: {error}{how}.", code="invalid_form") from None
        finally:
            self._close_file()
        if not self._is_finished:
            how = f": {self.how}" if self.how else ""
            raise InvalidRequest(f"The form ends before its last boundary{how}.", code="invalid_form")

    @abstractmethod
    def begin_part(self, field: str, filename: str) -> None:
        """Begin a part with these names. Raises InvalidRequest if the form does not have such a part."""

    @abstractmethod
    def write_part(self, data: bytes) -> None:
        """Write bytes of the part. Raises InvalidRequest if there are too many."""

    def end_part(self) -> None:
        """End the part."""
        self._close_file()

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_begin": self._begin_header,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": lambda data, start, end: self.write_part(data[start:end]),
            "on_part_end": self.end_part,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._disposition = b""

    def _begin_header(self) -> None:
        self._header.clear()
        self._value.clear()

    def _end_header(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            self._disposition = bytes(self._value)

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        field, filename = (options.get(key, b"").decode(errors="replace") for key in (b"name", b"filename"))
        self.begin_part(field, filename)

    def _finish(self) -> None:
        self._is_finished = True

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class FileForm(Form):
    """A form with one file and some fields. The object holds the fields by name, and the file's name and size. The
    file's bytes are at `path`.
    """

    def __init__(
        self,
        path: Path,
        threads: Threads,
        fields: Collection[str],
        max_bytes: int,
        too_large: Callable[[], Exception],
    ) -> None:
        """`fields` are the fields that the form may have in addition to `file`; `too_large` makes the error for a file
        that is too large.
        """
        super().__init__(threads)
        self.path = path
        self.filename = ""
        self.size = 0
        self.fields: dict[str, str] = {}
        self._known = ("file", *fields)
        self._max_bytes = max_bytes
        self._too_large = too_large
        self._name = ""
        self._text = bytearray()
        self._seen: set[str] = set()

    async def receive(self, content_type: str | None, body: AsyncIterator[bytes]) -> None:
        """Write the body. Raises InvalidRequest, UploadTooSlow, and the error of `too_large`."""
        await super().receive(content_type, body)
        if "file" not in self._seen:
            raise InvalidRequest("'file' is missing.", field="file", code="missing_required_parameter")

    def begin_part(self, field: str, filename: str) -> None:
        """Begin the file, or one of the fields."""
        if field not in self._known or field in self._seen:
            raise InvalidRequest(
                f"The form has each of {', '.join(self._known)} once; got '{field[:80]}'.",
                field=field[:80],
                code="invalid_form",
            )
        self._seen.add(field)
        self._name = field
        self._text.clear()
        if field == "file":
            self.filename = "".join(c for c in filename if c.isprintable())[:MAX_FILENAME] or "file"
            self._file = self.path.open("xb")

    def write_part(self, data: bytes) -> None:
        """Write bytes of the file, or keep those of a field."""
        if self._file is not None:
            self.size += len(data)
            if self.size > self._max_bytes:
                raise self._too_large()
            self._file.write(data)
        else:
            self._text += data
            if len(self._text) > MAX_FIELD_BYTES:
                raise InvalidRequest(f"'{self._name}' has more than {MAX_FIELD_BYTES} bytes.", field=self._name)

    def end_part(self) -> None:
        """End the file, or keep the field."""
        if self._file is None:
            self.fields[self._name] = self._text.decode(errors="replace")
        self._close_file()


LIMITS = {CONFIG_FILE: MAX_CONFIG_BYTES, **SOURCES}


class AdapterForm(Form):
    """Form with an adapter's files, which are written into a folder under their standard names, its name and optionally
    its base.
    """

    how = f"send the field 'name' and the files '{CONFIG_FILE}' and '{WEIGHTS_FILE}' as multipart/form-data"
    names: ClassVar[tuple[str, ...]] = ("name", "base_model")
    """Fields of the form: the adapter's name, its base, and others."""

    def __init__(self, folder: Path, threads: Threads) -> None:
        super().__init__(threads)
        self.name = ""
        self.base_model: str | None = None
        """Base that the form names; None if it names none."""
        self.ignored: set[str] = set()
        """Names of files that serving does not need and that are not kept."""
        self._folder = folder
        self._part = ""
        self._seen: dict[str, int] = {}
        """Number of bytes by part."""
        self._fields = {field: bytearray() for field in self.names}

    async def receive(self, content_type: str | None, body: AsyncIterator[bytes]) -> None:
        """Write the body. Raises InvalidRequest, UploadTooSlow."""
        await super().receive(content_type, body)
        name, base_model = self.names[:2]
        for part in (name, CONFIG_FILE, WEIGHTS_FILE):
            if not self._seen.get(part):
                nested = any("/" in file for file in self.ignored)
                way_out = explain_absence(self.ignored, "send its files by their names without the folder")
                raise InvalidRequest(
                    f"'{part}' is missing or empty: {self.how}.{f' {way_out}' if nested else ''}",
                    field=part,
                    code="missing_required_parameter",
                )
        self.name, self.base_model = self._text(name), self._text(base_model) or None

    def begin_part(self, field: str, filename: str) -> None:
        """Begin a file, or one of the fields."""
        self._part = self._known_part(field, filename)
        if is_ignored(self._part) and self._part not in SOURCES:
            self.ignored.add(self._part)
            if len(self.ignored) > MAX_IGNORED:
                raise InvalidRequest(f"The form has more than {MAX_IGNORED} files that are ignored.", code="too_large")
            return
        if self._part in self._seen:
            raise InvalidRequest(f"'{self._part}' is there twice: {self.how}.", field=self._part, code="invalid_form")
        self._seen[self._part] = 0
        if self._part not in self._fields:
            target = self._folder / self._part
            target.parent.mkdir(exist_ok=True)
            self._file = target.open("wb")

    def write_part(self, data: bytes) -> None:
        """Write bytes of a file, or keep those of a field."""
        if self._part in self.ignored:
            return
        self._seen[self._part] += len(data)
        limit = LIMITS.get(self._part, MAX_FIELD_BYTES if self._part in self._fields else None)
        if limit is not None and self._seen[self._part] > limit:
            raise InvalidRequest(f"'{self._part}' has more than {limit} bytes.", field=self._part, code="too_large")
        if self._file is None:
            self._fields[self._part].extend(data)
        else:
            self._file.write(data)

    def _text(self, field: str) -> str:
        try:
            return self._fields[field].decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"'{field}' is not UTF-8.", field=field, code="invalid_value") from None

    def _known_part(self, field: str, filename: str) -> str:
        """Return the known part with this field or this file's name. Raises InvalidRequest for an unknown part."""
        for known in (CONFIG_FILE, WEIGHTS_FILE, *SOURCES):
            if known in (field, filename):
                return known
        if field in self.names and not filename:
            return field
        if (ignored := next((name for name in (filename, field) if is_ignored(name)), None)) is not None:
            return ignored[:MAX_FIELD_BYTES]
        pickled = any(name.endswith((".bin", ".pt", ".pth", ".pkl")) for name in (field, filename))
        why = " Pickled weights are never read: save them with safetensors." if pickled else ""
        if (reason := misplaced((filename, field))) is not None:
            why = f" {reason}"
        raise InvalidRequest(
            f"'{(filename or field)[:80]}' is not a part of this form.{why} Please {self.how}.",
            field=field[:80],
            code="invalid_form",
        )


class LoadForm(AdapterForm):
    """The form of POST /v1/load_lora_adapter: an adapter's files, and vLLM's fields."""

    how = f"send the field 'lora_name' and the files '{CONFIG_FILE}' and '{WEIGHTS_FILE}' as multipart/form-data"
    names = ("lora_name", "base_model_name", "load_inplace", "is_3d_lora_weight")

    @property
    def load_inplace(self) -> bool:
        """Return whether the files replace those of the same name."""
        return self._text("load_inplace").strip().lower() in ("true", "1")

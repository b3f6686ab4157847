"""The console's built files, compressed by the build or once here, and the content security policy of its page."""

from __future__ import annotations

import gzip
import mimetypes
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "console"
"""`make console` writes it in a checkout; a wheel has it."""
INDEX = "index.html"
NONCE = "NONCE-OF-THIS-ANSWER"
"""Stands in the built page where each answer has a nonce of its own (`console/vite.config.ts`)."""
SMALL = 1024
"""Bytes that are not worth compressing."""
COMPRESSED = (".html", ".js", ".css", ".svg", ".json", ".map")
MISSING = """<!doctype html><html lang="en"><meta charset="utf-8"><title>loramux console</title>
<h1>The console is not built</h1>
<p>The API on this address works. The console's pages are built with Node.js and packages from npm:</p>
<pre>make console</pre>
<p>This command fetches Node.js from PyPI and the packages from registry.npmjs.org, and says what it cannot reach.
Wheels of loramux have the pages in them.</p>
"""


@dataclass(frozen=True)
class ConsoleFile:
    """One file as it is sent."""

    content: bytes
    encoded: Mapping[str, bytes]
    """The content by the encodings that it has too, the best first."""
    media_type: str
    is_immutable: bool
    """Its name has a digest of its content."""


class ConsoleFiles:
    """The files below one folder, each read when it is first asked for."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._names: frozenset[str] | None = None
        self._read: dict[str, ConsoleFile] = {}

    @property
    def is_built(self) -> bool:
        """Return whether there is a console."""
        return INDEX in self.names()

    def names(self) -> frozenset[str]:
        """Return the names of all files; nothing else is ever opened."""
        if not self._names:
            files = self._folder.rglob("*") if self._folder.is_dir() else ()
            self._names = frozenset(file.relative_to(self._folder).as_posix() for file in files if file.is_file())
        return self._names

    def file(self, name: str) -> ConsoleFile | None:
        """Return a file by its name below the folder; None where there is none."""
        if name not in self.names():
            return None
        if name not in self._read:
            self._read[name] = _load(self._folder / name, is_immutable=name.startswith("assets/"))
        return self._read[name]

    def page(self, nonce: str) -> bytes:
        """Return the one page of the console, whose styles may carry this nonce."""
        index = self.file(INDEX)
        assert index is not None, "asked before"
        return index.content.replace(NONCE.encode(), nonce.encode())


def new_nonce() -> str:
    """Return a nonce for one answer."""
    return secrets.token_urlsafe(18)


def content_security_policy(nonce: str) -> str:
    """Return the policy of the console's page: own scripts only, no third party, styles with the nonce, no frames."""
    return "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            f"style-src 'self' 'nonce-{nonce}'",
            "img-src 'self' data:",
            "font-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


def _load(path: Path, *, is_immutable: bool) -> ConsoleFile:
    content = path.read_bytes()
    encoded: dict[str, bytes] = {}
    brotli = path.with_name(path.name + ".br")
    if brotli.is_file():
        encoded["br"] = brotli.read_bytes()
    if path.suffix in COMPRESSED and len(content) >= SMALL:
        encoded["gzip"] = gzip.compress(content, 9, mtime=0)
    return ConsoleFile(
        content=content,
        encoded=encoded,
        media_type=mimetypes.guess_type(path.name)[0] or "application/octet-stream",
        is_immutable=is_immutable,
    )

"""Downloads: files that a caller stored are saved by its browser, never shown as pages of this origin.

A client may request a file and not read it. Bytes that are read ahead count in the tenant's share of memory, so a
client that reads nothing is disconnected (`ReaderLimit`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Literal
from urllib.parse import quote

from litestar.response import Stream
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from loramux_api.http_layer import ReaderLimit


def file_headers(filename: str, disposition: Literal["attachment", "inline"]) -> dict[str, str]:
    """Return the headers of a tenant's file: no browser guesses its type, runs it or caches it (RFC 6266)."""
    return {
        "Content-Disposition": f"{disposition}; filename*=UTF-8''{quote(filename, safe='')}",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


class Download(Stream):
    """A file, sent as an attachment at the client's speed."""

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        filename: str,
        size: int | None,
        media_type: str = "application/octet-stream",
    ) -> None:
        """`size` in bytes; None: not known before the end."""
        length = {} if size is None else {"Content-Length": str(size)}
        super().__init__(content, media_type=media_type, headers=file_headers(filename, "attachment") | length)
        self._content = content

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]  # Litestar calls it
        """Wrap Litestar's own response, which would wait for its client without a limit."""
        response = super().to_asgi_response(*args, **kwargs)

        async def timed(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                async with ReaderLimit(scope) as reader:

                    async def send_noted(message: Message) -> None:
                        await reader.take(send(message))

                    await response(scope, receive, send_noted)
            finally:
                await self._content.aclose()

        return timed

"""A model hub's `resolve` addresses on this machine, which notes what it was asked and answers as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Answer:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None
    """The Content-Length that is sent; None: the true one."""
    stalls: bool = False
    """The connection stays open after the body."""


@dataclass
class Hub:
    url: str
    answers: dict[str, Answer] = field(default_factory=dict)
    """Answers by path; other paths do not exist."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Host, path and Authorization."""


@contextmanager
def hub_double() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.asked.append((self.headers["Host"].partition(":")[0], self.path, self.headers["Authorization"]))
            answer = hub.answers.get(self.path, Answer(status=404))
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body) if answer.length is None else answer.length))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(answer.body)
            if answer.stalls:
                self.wfile.flush()
                self.rfile.read(1)  # until the client leaves

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = Hub(f"http://localhost:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()

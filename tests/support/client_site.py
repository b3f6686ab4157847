"""A server for clients that people have: its engine says what the prompt tells it to, and its requests are recorded.

The last turn of the user's has the answer in it: `<<text>>`. After the result of a tool the answer repeats the result.
So one server answers every client, and no client needs a model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from chat_site import chat_site
from constrained_site import TOOLS_TEMPLATE
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send
from scripted_engine import EOS
from site_fixture import Site

from loramux.engine.messages import EngineFault, Request

CONTEXT = 400_000
"""Tokens, which are bytes here: prompts of agents have tens of thousands."""
GREETING = "Hello."
_said = re.compile(r"<<(cut:|busy:)?(.*?)>>(?!>)", re.DOTALL)
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@dataclass
class Sent:
    """A request that a client sent."""

    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Recorder:
    """An ASGI application around another one, which keeps what clients send to it."""

    app: ASGIApp
    sent: list[Sent] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self.app(scope, receive, send)
            return
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        query = scope["query_string"].decode()
        one = Sent(f"{scope['path']}?{query}" if query else scope["path"], headers, b"")
        self.sent.append(one)

        async def received() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                one.body += message.get("body", b"")
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                one.status = message["status"]
            await send(message)

        await self.app(scope, received, sending)


@dataclass
class Script:
    """Answers by the words of the prompt."""

    seen: set[str] = field(default_factory=set)

    def __call__(self, request: Request) -> list[int | EngineFault]:
        prompt = bytes(token for token in request.prompt_token_ids if token < EOS).decode(errors="replace")
        how, text = self.answer(prompt)
        if how == "busy:" and prompt not in self.seen:
            self.seen.add(prompt)
            return [EngineFault("engine_overloaded", "the engine is busy", retry_after=1)]
        if how == "cut:":
            return [*text.encode(), EngineFault("internal_error", "the engine has failed")]
        return [*text.encode(), EOS]

    def answer(self, prompt: str) -> tuple[str | None, str]:
        """The answer to a prompt, and the fault that ends or delays it."""
        last = prompt[prompt.rfind("user: ") :]
        result = last.rpartition("tool: ")
        if result[1]:
            return None, f"It says {result[2].removesuffix('assistant:').strip()}"
        found = _said.search(last)
        return (None, GREETING) if found is None else (found[1], found[2])


@contextmanager
def client_site(folder: Path, **options: Any) -> Iterator[tuple[Site, Recorder]]:
    with chat_site(folder, TOOLS_TEMPLATE, context=CONTEXT, **options) as site:
        site.engine.script = Script()
        recorder = Recorder(site.server.app.asgi_handler)
        site.server.app.asgi_handler = recorder
        yield site, recorder


def tool_call(name: str, arguments: dict[str, Any]) -> str:
    """The answer that calls a tool, as a prompt has it."""
    return f"<<<tool_call>{msgspec.json.encode({'name': name, 'arguments': arguments}).decode()}</tool_call>>>"

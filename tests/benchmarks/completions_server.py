"""A small OpenAI-compatible server for tests of the load generator: real HTTP, real SSE, known answers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from litestar import Litestar, Request, Response, post
from litestar.datastructures import State
from litestar.params import JSONBody
from litestar.response import Stream

AnyRequest = Request[Any, Any, Any]
TOKEN_SECONDS = 0.002
THINKING_SECONDS = 0.5


@dataclass
class Seen:
    """Requests that the server got, and the order in which its answers began and ended."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    began: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    ended_when_began: dict[int, int] = field(default_factory=dict)
    """For each request, by the first token of its prompt: how many had ended when it began."""
    all_ten: asyncio.Event = field(default_factory=asyncio.Event)


def answer(model: str, prompt: list[int], index: int) -> int:
    """A token id that depends on model, prompt and place."""
    return zlib.crc32(f"{model} {prompt} {index}".encode())


async def _ten(seen: Seen) -> None:
    """Wait until ten requests have begun."""
    if len(seen.began) == 10:
        seen.all_ten.set()
    await seen.all_ten.wait()


async def _tokens(body: dict[str, Any], seen: Seen) -> AsyncIterator[str]:
    def event(data: object) -> str:
        return f"data: {json.dumps(data)}\n\n"

    number = body["prompt"][0]
    seen.began.append(number)
    seen.ended_when_began[number] = len(seen.ended)
    if body["model"] == "all-ten":
        await _ten(seen)
    yield ": a comment, as keep-alives are\n\n"
    yield event({"choices": [{"text": "", "index": 0}]})
    await asyncio.sleep(THINKING_SECONDS if body["model"] == "thinks-first" else 0)
    for index in range(body["max_tokens"]):
        await asyncio.sleep(TOKEN_SECONDS)
        if body["model"] == "breaks" and index == 2:
            yield event({"error": {"message": "the engine ended", "code": "internal_error"}})
            break
        token_ids = [answer(body["model"], body["prompt"], index)]
        told = {"token_ids": token_ids} if body.get("return_token_ids") else {}
        yield event({"choices": [{"text": f"{token_ids[0]} ", "index": 0, **told}]})
    seen.ended.append(number)
    if body["model"] not in {"breaks", "forgets-usage"}:
        yield event({"choices": [], "usage": {"completion_tokens": body["max_tokens"], "prompt_tokens": 1}})
    yield "data: [DONE]\n\n"


@post("/v1/completions", status_code=200)
async def completions(data: JSONBody[dict[str, Any]], request: AnyRequest) -> Response[Any] | Stream:
    """Stream `max_tokens` tokens, or refuse a model called absent."""
    seen: Seen = request.app.state.seen
    seen.bodies.append(data)
    seen.keys.add(request.headers.get("authorization", ""))
    if data["model"] == "absent":
        return Response({"error": {"message": "model 'absent' does not exist"}}, status_code=404)
    return Stream(_tokens(data, seen), media_type="text/event-stream")


@contextmanager
def serving() -> Iterator[tuple[str, Seen]]:
    """The server on a free port, in a thread: its URL up to /v1, and what it has seen."""
    seen = Seen()
    app = Litestar([completions], state=State({"seen": seen}), openapi_config=None)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1", seen
    finally:
        server.should_exit = True
        thread.join(10)

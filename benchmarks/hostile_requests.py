"""Requests of the tenant `hostile` in `hostile_neighbours.py`, in a separate process.

    python benchmarks/hostile_requests.py URL KEY

The process prepares the tenant's adapter and files, prints `ready`, and reads names of kinds on stdin. After each name
it sends the requests of that kind until the next name, and prints the name when they have begun. At the end of stdin it
prints, as JSON, how often the requests of each kind and name have ended in which way.

- `alone`: no requests.
- `harmless`: answers in small formats, and an adapter with a plain chat template.
- `requests`: lists of the tenant's files.
- `formats`: the 200 schemas, expressions and grammars of `tests/support/hostile_grammars.py`, each in a new form, so
  that no result of a trial is reused, and the same adapter with conversations for which its template loops, recurses or
  grows.
- `bodies`: lists, maps and nested values that are as large as their route allows, or much larger (`WIDE_BODIES`).
- `pools`: requests that occupy threads, connections and memory (`HOLDING`): downloads that are not read, batches whose
  lines wait, files and bodies that arrive slowly, judges with encoded replies, silent webhooks, silent connections.
- `images`: the largest images, the most images and the largest files of a request, and images that are refused
  (`hostile_images.KINDS`). Each name has separate places, because some requests wait long. The base must read images.
- `pictures`: as many requests, each with an ordinary image.

`bodies/NAME`, `pools/NAME` and `images/NAME` are only the requests whose names begin with NAME. Requests of the first
two kinds compute nothing that a step of `steady` waits for, but for a few answers of evaluations, so their baseline is
`requests`.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import hostile_images
import httpx
from fairness import BENCHMARKS

from loramux.constraints.formats import AnswerFormat, Choice, Grammar, JsonObject, JsonSchema, Regex

sys.path.append(str(BENCHMARKS.parent / "tests/support"))
from hostile_grammars import corpus

HOSTILE = "hostile"
ADAPTERS = BENCHMARKS.parent / "demo/loramux_demo/assets/adapters"
PLACES = 6
"""Requests at a time, of kinds whose requests end by themselves."""
IMAGE_PLACES = 2
"""Requests with images at a time, of each name."""
PAUSE_SECONDS = 0.05
"""Pause of a place after a request, so that this process leaves the processor to the server."""
DRIP_SECONDS = 0.2
"""Pause between two parts of what arrives slowly."""
TOKENS = 24
"""Output tokens of an answer."""
KIB, MIB = 1 << 10, 1 << 20
BOMB = gzip.compress(gzip.compress(bytes(64 * MIB)))
"""A reply of a judge that decodes to 64 MiB."""
TRICKS = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "wide": "{{ asked * 100000000 }}",
    "doubling": (
        "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}"
    ),
    "power": "{{ ((asked | length) ** 9999999) | string | length }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}
"""Hostile parts of the template, each for conversations that name it. For other conversations the template is plain, so
that the upload passes. Each part depends on the conversation, because constant parts are computed, and refused, when a
template is compiled.
"""
TEMPLATE = (
    "{% set asked = messages[-1].content %}"
    + "".join(f"{{% if asked == '{name}' %}}{trick}{{% endif %}}" for name, trick in TRICKS.items())
    + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)

Body = dict[str, Any]


@dataclass(frozen=True)
class WideBody:
    """A body with one field that has as many values as fit into `size` bytes."""

    name: str
    path: str
    """Dots separate the fields that contain each other."""
    size: int
    field: str
    value: str = '""'
    """One value of the list, as JSON. In a map, each value has its number as its name."""
    is_map: bool = False
    around: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the body."""
    method: str = "POST"

    def encode(self) -> bytes:
        """Write the body."""
        if self.is_map:
            count = self.size // (len(self.value) + 11)
            values = "{" + ",".join(f'"{n:07}":{self.value}' for n in range(count)) + "}"
        else:
            values = "[" + ",".join(itertools.repeat(self.value, self.size // (len(self.value) + 1))) + "]"
        *outer, inner = self.field.split(".")
        text = f'"{inner}":{values}'
        for name in reversed(outer):
            text = f'"{name}":{{{text}}}'
        return f"{json.dumps(dict(self.around))[:-1]}{', ' if self.around else ''}{text}}}".encode()


HUGE = 14 * MIB
"""Bytes of a body that no route but those of batches and files takes."""
MANAGED, LISTED, ASKED = 60 * KIB, 500 * KIB, 1000 * KIB
"""Bytes just below the limits of management routes, of routes with lists, and of inference with a short context."""
_CHAT = {"model": f"{HOSTILE}/pirate", "messages": [{"role": "user", "content": "go"}], "max_tokens": 1}
_BASE = {"model": "base", "max_tokens": 1}
_GUARD = "/v1/adapters/pirate/aliases/default/guard"
_BATCH = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": "file"}
_WORD = '"a word"'
_TOOL = '{"type": "function", "function": {"name": "f", "description": "' + "x" * 100 + '"}}'
WIDE_BODIES = (
    WideBody("models of a key", "/v1/keys", HUGE, "models"),
    WideBody("scopes of a key", "/v1/keys", HUGE, "scopes"),
    WideBody("events of a webhook", "/v1/webhooks", HUGE, "events", around={"url": "https://example.com"}),
    WideBody("measures of a guard", _GUARD, HUGE, "measures", method="PUT"),
    WideBody("metadata of a batch", "/v1/batches", HUGE, "metadata", is_map=True, around=_BATCH),
    WideBody("scopes within the limit", "/v1/keys", LISTED, "scopes", _WORD),
    WideBody("models within the limit", "/v1/keys", LISTED, "models", _WORD),
    WideBody("events within the limit", "/v1/webhooks", MANAGED, "events", around={"url": "https://example.com"}),
    WideBody("metadata within the limit", "/v1/batches", MANAGED, "metadata", is_map=True, around=_BATCH),
    WideBody("files of an upload", "/v1/uploads", LISTED, "files", "{}", is_map=True, around={"adapter": "a"}),
    WideBody("schema of a grader", "/v1/evaluations", LISTED, "grader.schema.enum", _WORD),
    WideBody("stop strings", "/v1/chat/completions", ASKED, "stop", _WORD, around=_CHAT),
    WideBody("biases", "/v1/chat/completions", ASKED, "logit_bias", "1", is_map=True, around=_CHAT),
    WideBody("variables of a template", "/v1/chat/completions", ASKED, "chat_template_kwargs.a", _WORD, around=_CHAT),
    WideBody("fields that are not known", "/v1/chat/completions", ASKED, "extra", '{"a":"a value"}', around=_CHAT),
    WideBody("tools", "/v1/chat/completions", ASKED, "tools", _TOOL, around=_CHAT),
    WideBody("lists within lists", "/v1/chat/completions", ASKED, "tools", "[[]]", around=_CHAT),
    WideBody("prompts", "/v1/completions", ASKED, "prompt", "[1, 2, 3, 4, 5, 6, 7, 8]", around=_BASE),
    WideBody("inputs of embeddings", "/v1/embeddings", ASKED, "input", _WORD, around={"model": "base"}),
    WideBody("metadata of a response", "/v1/responses", ASKED, "metadata", is_map=True, around=_BASE | {"input": "x"}),
    WideBody("requests of a batch", "/v1/messages/batches", HUGE, "requests", '{"custom_id": "' + "x" * 300 + '"}'),
    WideBody("integrations of a job", "/v1/fine_tuning/jobs", HUGE, "integrations", around=_BASE),
)
"""A request of each route that takes lists or maps, of the largest size and of sizes that its route reads."""
_FORM = "multipart/form-data; boundary=slow"
_FIELD = b'--slow\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
_FILE = b'--slow\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n\r\n'
SLOW_BODIES = {
    "/v1/files": (_FORM, _FIELD % (b"purpose", b"batch") + _FILE % (b"file", b"slow.jsonl")),
    "/v1/adapters": (_FORM, _FIELD % (b"name", b"slow") + _FILE % ((b"adapter_model.safetensors",) * 2)),
    "/v1/completions": ("application/json", b'{"model": "base", "prompt": "'),
}
"""The content type and the beginning of bodies that arrive slowly, by route."""


def harmless_bodies() -> Iterator[Body]:
    """Yield as many requests as `hostile_bodies` of each kind, which ask for nothing bad."""
    for number in itertools.count():
        yield _format_body(Choice([f"yes {number}", "no"]))
        if number % 2:
            yield _chat_body(f"hello {number}")


def hostile_bodies() -> Iterator[Body]:
    """Yield requests without end: formats of the corpus alternate with conversations for which the template fails."""
    formats, tricks = corpus(), itertools.cycle(TRICKS)
    for number in itertools.count():
        yield _format_body(_fresh(formats[number * 7 % len(formats)][1], number))
        if number % 2:
            yield _chat_body(next(tricks))


def _chat_body(content: str) -> Body:
    return {"model": f"{HOSTILE}/pirate", "messages": [{"role": "user", "content": content}]}


def _format_body(format: AnswerFormat) -> Body:
    match format:
        case JsonSchema(schema):
            outputs: Body = {"json": schema}
        case Regex(pattern):
            outputs = {"regex": pattern}
        case Grammar(text):
            outputs = {"grammar": text}
        case Choice(texts):
            outputs = {"choice": texts}
        case JsonObject():
            outputs = {"json_object": True}
    return {"model": "base", "messages": [{"role": "user", "content": "go"}], "structured_outputs": outputs}


def _fresh(format: AnswerFormat, number: int) -> AnswerFormat:
    """Return an equally hostile format with another text, because results of trials are kept by tenant and text."""
    match format:
        case JsonSchema(schema) if isinstance(schema, dict):
            return JsonSchema(schema | {"description": str(number)}, format.strict)
        case Grammar(text):
            return Grammar(f"{text}\n// {number}")
        case Choice(texts):
            return Choice([*texts, f"{number} more"])
        case Regex(pattern):
            return Regex(f"({pattern})|{number}")
    return format


Send = Callable[[], Awaitable[str]]
"""Sends one request, and returns how it ended."""


class Attacker:
    """The tenant `hostile`: what it has prepared, and its requests."""

    def __init__(self, url: str, key: str) -> None:
        self._key = key
        self._address = httpx.URL(url)
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(120.0),
            limits=httpx.Limits(max_connections=None),
        )
        self._files: dict[str, str] = {}
        self._webhook = ""
        self._judge = ""
        self._encoded = [(body, body.encode()) for body in WIDE_BODIES]
        self.seen: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Numbers of requests by their kind and name, and by their ending."""

    async def prepare(self, port: int) -> None:
        """Give the tenant an adapter whose template is plain on the trial's conversations, its files, and a webhook of
        the receiver at `port`. Requests with images need none of them.
        """
        if "image" in (await self._ask("GET", "/v1/models/base"))["input_modalities"]:
            return
        for adapter in ("upper", "pirate"):  # two revisions, which evaluations compare
            names = ("adapter_config.json", "adapter_model.safetensors")
            files = {name: (name, (ADAPTERS / adapter / name).read_bytes()) for name in names}
            files["chat_template.jinja"] = ("chat_template.jinja", TEMPLATE.encode())
            await self._ask("POST", "/v1/adapters", data={"name": "pirate"}, files=files)
        await self._ask("POST", "/v1/adapters/pirate/promote", json={"revision": 2})
        body = {"model": "base", "prompt": [1] * 340_000, "max_tokens": 1}
        line = json.dumps({"custom_id": "@", "method": "POST", "url": "/v1/completions", "body": body})
        contents = {
            "download": ("batch", bytes(15 * MIB)),
            "lines": ("batch", "\n".join(line.replace("@", str(n)) for n in range(22)).encode()),
            "questions": ("evals", b"".join(b'{"prompt": "x%d"}\n' % n for n in range(4))),
        }
        for name, (purpose, content) in contents.items():
            sent = {"file": (f"{name}.jsonl", content)}
            self._files[name] = (await self._ask("POST", "/v1/files", data={"purpose": purpose}, files=sent))["id"]
        self._judge = f"http://127.0.0.1:{port}/encoded"
        hook = {"url": f"http://127.0.0.1:{port}/silent"}
        self._webhook = (await self._ask("POST", "/v1/webhooks", json=hook))["id"]

    def requests_of(self, kind: str) -> list[tuple[str, Send]]:
        """Return what each place of the kind sends again and again, with its name."""
        if kind == "alone":
            return []
        kind, _, wanted = kind.partition("/")
        if kind == "requests":
            return [("files", partial(self._end, "GET", "/v1/files"))] * PLACES
        if kind == "bodies":
            bodies = itertools.cycle([one for one in self._encoded if one[0].name.startswith(wanted)])
            return [("", self._wide(bodies, is_chunked=place % 2 == 1)) for place in range(PLACES)]
        if kind == "pools":
            holding = {name: one for name, one in self._holding().items() if name.startswith(wanted)}
            return [(name, send) for name, (places, send) in holding.items() for _ in range(places)]
        if kind in ("images", "pictures"):
            named = [one for one in hostile_images.KINDS if one.name.startswith(wanted)]
            sent = named if kind == "images" else [hostile_images.ORDINARY] * len(hostile_images.KINDS)
            return [(one.name, self._show(one)) for one in sent for _ in range(IMAGE_PLACES)]
        bodies_of = {"harmless": harmless_bodies, "formats": hostile_bodies}[kind]()
        return [("answers", self._answer(bodies_of))] * PLACES

    def _holding(self) -> dict[str, tuple[int, Send]]:
        """Requests that occupy something, each with its number of places."""
        return {
            "unread download": (20, self._unread_download),
            "lines that wait": (4, self._waiting_lines),
            **{f"slow body of {path}": (8, partial(self._slow, path, *sent)) for path, sent in SLOW_BODIES.items()},
            "encoded judge": (2, self._encoded_judge),
            "silent webhook": (8, self._silent_webhook),
            "silent connection": (32, self._silent_connection),
        }

    def _answer(self, bodies: Iterator[Body]) -> Send:
        async def send() -> str:
            return await self._end("POST", "/v1/chat/completions", json=next(bodies) | {"max_tokens": TOKENS})

        return send

    def _show(self, requests: hostile_images.ImageRequests) -> Send:
        bodies, headers = requests.bodies(), {"Content-Type": "application/json"}

        async def send() -> str:
            return await self._end("POST", "/v1/chat/completions", content=next(bodies), headers=headers)

        return send

    def _wide(self, bodies: Iterator[tuple[WideBody, bytes]], *, is_chunked: bool) -> Send:
        async def parts(content: bytes) -> AsyncIterator[bytes]:
            for begin in range(0, len(content), 64 * KIB):
                yield content[begin : begin + 64 * KIB]

        async def send() -> str:
            body, content = next(bodies)
            sent = parts(content) if is_chunked else content
            headers = {"Content-Type": "application/json"}
            return f"{body.name}: {await self._end(body.method, body.path, content=sent, headers=headers)}"

        return send

    async def _unread_download(self) -> str:
        head = (
            f"GET /v1/files/{self._files['download']}/content HTTP/1.1\r\nHost: {self._address.netloc.decode()}\r\n"
            f"Authorization: Bearer {self._key}\r\n\r\n"
        )
        return await self._hold_connection(head.encode())

    async def _silent_connection(self) -> str:
        return await self._hold_connection(b"POST /v1/completions HTTP/1.1\r\n")

    async def _hold_connection(self, head: bytes) -> str:
        """Send `head`, and wait until the server closes the connection, without reading."""
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port, limit=4 * KIB)
        try:
            writer.write(head)
            while not reader.at_eof():
                await asyncio.sleep(1)
                if reader.exception() is not None:
                    break
            return "closed"
        finally:
            writer.transport.abort()

    async def _waiting_lines(self) -> str:
        batch = await self._ask("POST", "/v1/batches", json=_BATCH | {"input_file_id": self._files["lines"]})
        path = f"/v1/batches/{batch['id']}"
        try:
            return await self._wait(path)
        except asyncio.CancelledError:
            await self._end("POST", f"{path}/cancel")
            raise

    async def _slow(self, path: str, content_type: str, head: bytes) -> str:
        """Send a body whose end does not come."""

        async def parts() -> AsyncIterator[bytes]:
            yield head
            while True:
                yield b"a" * KIB
                await asyncio.sleep(DRIP_SECONDS)

        return await self._end("POST", path, content=parts(), headers={"Content-Type": content_type})

    async def _encoded_judge(self) -> str:
        grader = {"type": "judge", "url": self._judge, "model": "m"}
        asked = {"adapter": "pirate", "revision": 2, "against": 1, "file_id": self._files["questions"]}
        made = await self._ask("POST", "/v1/evaluations", json=asked | {"grader": grader})
        return await self._wait(f"/v1/evaluations/{made['id']}")

    async def _silent_webhook(self) -> str:
        return await self._end("POST", f"/v1/webhooks/{self._webhook}/test")

    async def _wait(self, path: str) -> str:
        """Return the status of a batch or an evaluation when it has ended."""
        while True:
            status = str((await self._ask("GET", path))["status"])
            if status not in ("validating", "in_progress", "finalizing", "running"):
                return status
            await asyncio.sleep(1)

    async def _ask(self, method: str, path: str, **sent: Any) -> Body:
        answer = await self._client.request(method, path, **sent)
        if answer.is_error:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:500]}")
        found: Body = answer.json()
        return found

    async def _end(self, method: str, path: str, **sent: Any) -> str:
        """Send a request, and return the code of its refusal or its status."""
        try:
            answer = await self._client.request(method, path, **sent)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            return "connection closed"  # the server does not read the rest of a body that it refuses
        refusal = answer.json().get("error") if answer.is_error else None
        return str((isinstance(refusal, dict) and refusal.get("code")) or answer.status_code)

    async def repeat(self, kind: str, name: str, send: Send) -> None:
        """Send without end, and count how it ends."""
        try:
            while True:
                self.seen[f"{kind} {name}".strip()][await send()] += 1
                await asyncio.sleep(PAUSE_SECONDS)
        except asyncio.CancelledError:
            self.seen[f"{kind} {name}".strip()]["unfinished"] += 1
            raise
        except RuntimeError as error:
            self.seen[f"{kind} {name}".strip()][str(error)] += 1


async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a judge's call with an encoded reply, and a webhook's not at all."""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        head = await reader.readuntil(b"\r\n\r\n")
        if b" /encoded" in head:
            answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip, gzip\r\nContent-Length: %d\r\n\r\n"
            writer.write(answer % len(BOMB) + BOMB)
            await writer.drain()
        await reader.read()
    writer.close()


async def lines_of_stdin() -> AsyncIterator[str]:
    """Yield the lines of stdin as they come."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async for line in reader:
        yield line.decode().strip()


async def attack(url: str, key: str) -> None:
    """Send what stdin asks for, until its end."""
    attacker = Attacker(url, key)
    async with await asyncio.start_server(receive, "127.0.0.1") as receiver:
        await attacker.prepare(receiver.sockets[0].getsockname()[1])
        print("ready", flush=True)
        tasks: list[asyncio.Task[None]] = []

        async def end() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        async for kind in lines_of_stdin():
            await end()
            requests = attacker.requests_of(kind)
            tasks = [asyncio.create_task(attacker.repeat(kind.partition("/")[0], *one)) for one in requests]
            print(kind, flush=True)
        await end()
    print(json.dumps(attacker.seen), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Send hostile requests; hostile_neighbours.py starts this.")
    parser.add_argument("url")
    parser.add_argument("key")
    given = parser.parse_args()
    asyncio.run(attack(given.url, given.key))

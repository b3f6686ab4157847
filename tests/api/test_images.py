"""Images through every API that takes them: what reaches the engine, by whichever way the caller sends an image."""

from __future__ import annotations

import base64
import gc
import json
import os
import shutil
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from client_environments import PATIENCE, RegistryError, make_environment
from image_base import IMAGE_TOKEN_ID, make_image_base, picture, saved
from running_server import running
from scripted_engine import FACTS, ScriptedEngine
from site_fixture import Site, make_keys, make_settings

from loramux.common.settings.serving import ImageSettings
from loramux_api.app import create_app

SCRIPT = Path(__file__).parent / "real_clients" / "use_images.py"
PICTURE = saved(picture(56, 56))
NUM_TOKENS = 4
DATA = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{DATA}"


MOVED = {
    "/moved.png": "/a.png",
    "/round.png": "/round.png",
    "/out.png": "gopher://nowhere.invalid/",
    "/file.png": "file:///etc/passwd",
}
OTHERS = {"/large.png": bytes(3 << 20), "/text.png": b"text"}


class Web(BaseHTTPRequestHandler):
    """A web site with a picture, and with answers that no picture has."""

    cookies: list[str | None] = []  # noqa: RUF012 - of all requests

    def do_GET(self) -> None:
        self.cookies.append(self.headers["cookie"])
        if self.path == "/slow.png":
            time.sleep(6)
        if (location := MOVED.get(self.path)) is not None:
            self.send_response(302)
            self.send_header("location", location)
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none.png" else 200)
        self.send_header("set-cookie", "tenant=acme")
        self.end_headers()
        with suppress(ConnectionError):
            self.wfile.write(OTHERS.get(self.path, PICTURE))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server whose base reads images, also from private addresses."""
    settings = make_settings(make_image_base(tmp_path_factory.mktemp("base")), tmp_path_factory.mktemp("site"))
    images = ImageSettings(max_bytes=2 << 20, fetch_seconds=4, allow_private_addresses=True)
    privacy = msgspec.structs.replace(settings.privacy, response_seconds=3600)
    settings = msgspec.structs.replace(settings, images=images, privacy=privacy)
    facts = msgspec.structs.replace(FACTS, vocab_size=261, images=True, max_model_len=1024)
    engine = ScriptedEngine(facts=facts, script=lambda _: [*b"seen", 256])
    keys = make_keys(settings)
    with running(create_app(settings, engine), "granian") as server:
        yield Site(server, engine, settings, keys)


def test_a_server_starts_the_decoding_process_before_its_first_image(open_site: Site) -> None:
    images = open_site.server.app.state.platform.completions.bases["tiny"].images
    assert images.sandbox._process.poll() is None


@pytest.mark.parametrize("path", ["/v1/models/tiny", "/v1/models"])
def test_models_say_that_prompts_may_have_images(open_site: Site, path: str) -> None:
    with open_site.http() as http:
        card = http.get(path).json()
    assert card.get("data", [card])[0]["input_modalities"] == ["text", "image"]


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def sees(site: Site, num_images: int = 1) -> list[int]:
    """Assert that the engine got images as the latest request, and return its prompt."""
    request = site.engine.requests[-1]
    assert [image.num_tokens for image in request.images] == [NUM_TOKENS] * num_images
    assert request.prompt_token_ids.count(IMAGE_TOKEN_ID) == NUM_TOKENS * num_images
    assert len({image.digest for image in request.images}) == 1
    return request.prompt_token_ids


def test_chat_takes_data_urls_addresses_and_files(open_site: Site, web: str) -> None:
    with open_site.openai() as client:
        file = client.files.create(file=("a.png", PICTURE), purpose="vision")
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
            {"type": "image_url", "image_url": {"url": f"{web}/a.png"}},
            {"type": "image_url", "image_url": {"url": f"{web}/moved.png", "detail": "low"}},
            {"type": "image_file", "image_file": {"file_id": file.id}},
            {"type": "text", "text": "what?"},
        ]
        done = client.chat.completions.create(model="tiny", messages=[user(*parts)])
        assert done.choices[0].message.content == "seen"
        prompt = sees(open_site, 4)
        assert done.usage is not None
        assert done.usage.prompt_tokens == len(prompt)
        details: Any = done.usage.prompt_tokens_details
        assert details.image_tokens == 4 * NUM_TOKENS
        stream = client.chat.completions.create(model="tiny", messages=[user(*parts)], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "seen"
        assert sees(open_site, 4) == prompt
        called = [
            {"id": "c1", "type": "function", "function": {"name": "shoot", "arguments": "{}"}},
        ]
        turns: list[Any] = [user("hi"), {"role": "assistant", "tool_calls": called}]
        turns[0]["content"] = "hi"
        client.chat.completions.create(
            model="tiny", messages=[*turns, {"role": "tool", "tool_call_id": "c1", "content": parts[:1]}]
        )
        sees(open_site)


def test_responses_take_images_and_a_stored_response_keeps_them(open_site: Site, web: str) -> None:
    with open_site.openai() as client:
        file = client.files.create(file=("a.png", PICTURE), purpose="vision")
        parts: list[Any] = [
            {"type": "input_image", "image_url": URL, "detail": "auto"},
            {"type": "input_image", "image_url": f"{web}/a.png", "detail": "auto"},
            {"type": "input_image", "file_id": file.id, "detail": "auto"},
            {"type": "input_text", "text": "what?"},
        ]
        first = client.responses.create(model="tiny", input=[user(*parts)])
        assert first.output_text == "seen"
        assert first.usage is not None
        assert first.usage.input_tokens_details.image_tokens == 3 * NUM_TOKENS  # type: ignore[attr-defined]
        sees(open_site, 3)
        client.responses.create(model="tiny", input="and now?", previous_response_id=first.id)
        sees(open_site, 3)
        (item,) = client.responses.input_items.list(first.id).data
        assert item.content[0].image_url == URL  # type: ignore[union-attr]
        output = [{"type": "input_image", "image_url": URL, "detail": "low"}]
        calls: list[Any] = [
            {"type": "function_call", "call_id": "c1", "name": "shoot", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": output},
        ]
        client.responses.create(model="tiny", input=[user({"type": "input_text", "text": "a"}), *calls], store=False)
        sees(open_site)
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.content\[0\]"):
            client.responses.create(model="tiny", input=[user({"type": "input_image", "image_url": URL[:90]})])


def test_messages_take_images_in_turns_and_in_results_of_tools(open_site: Site, web: str) -> None:
    sources = [
        {"type": "base64", "media_type": "image/png", "data": DATA},
        {"type": "url", "url": f"{web}/a.png"},
    ]
    with open_site.http() as http:
        form = {"files": {"file": ("a.png", PICTURE)}, "data": {"purpose": "vision"}}
        sources.append({"type": "file", "file_id": http.post("/v1/files", **form).json()["id"]})
        blocks = [{"type": "image", "source": source} for source in sources]
        use = {"type": "tool_use", "id": "t1", "name": "shoot", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "it"}, blocks[0]]}
        turns = [
            user(*blocks, {"type": "text", "text": "what?"}),
            {"role": "assistant", "content": [use]},
            user(result),
        ]
        body = {"model": "tiny", "max_tokens": 8, "messages": turns}
        answer = http.post("/v1/messages", json=body)
        assert answer.json()["content"][0]["text"] == "seen", answer.text
        prompt = sees(open_site, 4)
        counted = http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": turns}).json()
        assert counted["input_tokens"] == len(prompt)
        turns[0]["content"][0]["source"] = {"type": "base64", "data": "AAAA"}
        refused = http.post("/v1/messages", json=body)
        assert refused.status_code == 400
        assert "messages[0].content[0]" in refused.json()["error"]["message"]


def test_lines_of_batches_have_images(open_site: Site) -> None:
    body = {"model": "tiny", "messages": [user({"type": "image_url", "image_url": {"url": URL}})]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    with open_site.openai() as client:
        file = client.files.create(file=("b.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        until = time.monotonic() + 60
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < until, batch
            time.sleep(0.2)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 1, batch
        sees(open_site)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/slow.png", "not arrived within 4 seconds"),
        ("/round.png", "redirects more than 3 times"),
        ("/out.png", "has no public address"),
        ("/file.png", "gives no answer"),
        ("/none.png", "answers 404"),
        ("/large.png", "more than 2097152 bytes"),
        ("/text.png", "none of PNG"),
    ],
)
def test_an_address_without_a_picture_is_refused_by_its_field(
    open_site: Site, web: str, path: str, reason: str
) -> None:
    refused_address(open_site, f"{web}{path}", reason)


def refused_address(site: Site, address: str, reason: str) -> None:
    part: Any = {"type": "image_url", "image_url": {"url": address}}
    with site.openai() as client, pytest.raises(openai.BadRequestError, match=reason) as refusal:
        client.chat.completions.create(model="tiny", messages=[user({"type": "text", "text": "a"}, part)])
    assert refusal.value.param == "messages[0].content[1]"


def test_no_cookie_of_a_site_is_kept_for_another_request(open_site: Site, web: str) -> None:
    Web.cookies.clear()
    with open_site.openai() as client:
        for _ in range(2):
            part: Any = {"type": "image_url", "image_url": {"url": f"{web}/a.png"}}
            client.chat.completions.create(model="tiny", messages=[user(part)])
    assert Web.cookies == [None, None]


def test_a_file_of_another_tenant_or_purpose_is_refused(open_site: Site) -> None:
    with open_site.openai("globex") as globex, open_site.openai() as client:
        theirs = globex.files.create(file=("a.png", PICTURE), purpose="vision").id
        other = client.files.create(file=("a.png", PICTURE), purpose="evals").id
        for id, reason in ((theirs, "No such file"), (other, "with the purpose 'vision'")):
            part: Any = {"type": "image_file", "image_file": {"file_id": id}}
            with pytest.raises((openai.BadRequestError, openai.NotFoundError), match=reason) as refusal:
                client.chat.completions.create(model="tiny", messages=[user(part)])
            assert refusal.value.param == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("role", "part", "reason"),
    [
        ("system", {"type": "image_url", "image_url": {"url": URL}}, "images belong into a user's turn"),
        ("assistant", {"type": "image_url", "image_url": {"url": URL}}, "images belong into a user's turn"),
        ("user", {"type": "image_url"}, "Missing required parameter"),
        ("user", {"type": "image_url", "image_url": {}}, "holds no image"),
        ("user", {"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}, "auto, low, high, original"),
        ("user", {"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "no data URL of base64"),
        ("user", {"type": "image_url", "image_url": {"url": "A" * 9000}}, "write data:image/png;base64, before"),
        ("user", {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "begins with https"),
        ("user", {"type": "input_audio"}, "type 'input_audio'.* it is not served"),
        ("user", {"type": "video", "video": "https://a.example/b.mp4"}, "type 'video'.* it is not served"),
    ],
)
def test_a_part_that_is_no_image_is_refused_by_its_field(
    open_site: Site, role: str, part: dict[str, Any], reason: str
) -> None:
    turn: Any = {"role": role, "content": [{"type": "text", "text": "a"}, part]}
    with open_site.openai() as client, pytest.raises(openai.BadRequestError, match=reason) as refusal:
        client.chat.completions.create(model="tiny", messages=[turn, {"role": "user", "content": "b"}])
    assert "messages[0].content[1]" in str(refusal.value.param)


@pytest.mark.parametrize("head", ["DATA:IMAGE/PNG;BASE64", "data:image/png;charset=utf-8;Base64 ", "data:;base64"])
def test_a_data_url_is_read_in_any_case(open_site: Site, head: str) -> None:
    with open_site.openai() as client:
        part: Any = {"type": "image_url", "image_url": {"url": f"{head},{DATA}"}}
        client.chat.completions.create(model="tiny", messages=[user(part)])
    assert sees(open_site)


def test_a_body_may_hold_the_most_images_as_base64_and_not_more(open_site: Site) -> None:
    filler = "A" * (1 << 20)
    with open_site.http() as http:
        for count, status in ((26, 400), (30, 413)):
            parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{filler}"}}] * count
            answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": [user(*parts)]})
            assert answer.status_code == status, answer.text


LARGE = base64.b64encode(PICTURE + bytes(1 << 20)).decode()
"""The picture's file with bytes after its end: large as base64, and few patches."""
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "messages": [user({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{LARGE}"}})]
    },
    "/v1/responses": {
        "input": [user({"type": "input_image", "image_url": f"data:image/png;base64,{LARGE}"})],
        "store": False,
    },
    "/v1/messages": {
        "messages": [user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": LARGE}})],
        "max_tokens": 1000,
    },
}


def large_blocks() -> list[str]:
    """The places that allocated what is as large as the image."""
    return [str(trace.traceback) for trace in tracemalloc.take_snapshot().traces if trace.size > len(LARGE) / 2]


@pytest.mark.parametrize("path", BODIES)
def test_an_open_stream_holds_neither_its_body_nor_its_images_as_base64(open_site: Site, path: str) -> None:
    body = json.dumps({"model": "tiny", "stream": True, **BODIES[path]}).encode()
    engine = open_site.engine
    engine.pause, engine.script, before = 0.1, lambda _: [*b"a" * 900, 256], engine.script
    tracemalloc.start()
    try:
        with open_site.http() as http, http.stream("POST", path, content=body) as answer:
            assert answer.status_code == 200, answer.read()
            events = answer.iter_raw()  # without a name, it would close the stream at once
            next(events)
            until = time.monotonic() + 120
            while held := large_blocks():  # what is no longer referenced may wait for the collector
                assert time.monotonic() < until, held
                gc.collect()
            assert engine.running, "the stream is still open"
    finally:
        tracemalloc.stop()
        engine.pause, engine.script = 0.0, before
    sees(open_site)


CLIENTS = ("openai", "anthropic", "langchain-openai", "langchain-anthropic")


@pytest.mark.slow
def test_official_clients_send_images_unchanged(open_site: Site, web: str, tmp_path: Path) -> None:
    try:
        programs = make_environment(tmp_path / "environment", *CLIENTS)
    except RegistryError as error:
        pytest.skip(f"the clients cannot be installed here: {error}")
    facts = {"URL": open_site.url, "KEY": open_site.keys["acme"], "DATA": DATA, "ADDRESS": f"{web}/a.png"}
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | facts
    command = [str(programs / "python"), str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment, check=False)
    assert done.stdout.endswith("ok\n"), (done.stdout + done.stderr)[-4000:]
    shutil.rmtree(tmp_path / "environment")
    with_images = [request for request in open_site.engine.requests if len(request.images) == 2]
    assert len(with_images) >= int(done.stdout.split()[-2])

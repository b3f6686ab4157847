"""Open WebUI's calls, with its own conversion of chats to Responses.

The package needs gigabytes to be imported, so its function is read from its source. What it sends is built as its
router (`open_webui/routers/openai.py`) builds it.
"""

import ast
import importlib.metadata
import json
import urllib.error
import urllib.request
from pathlib import Path

import steps

ROUTER = importlib.metadata.distribution("open-webui").locate_file("open_webui/routers/openai.py")
WANTED = ("RESPONSES_ALLOWED_FIELDS", "_normalize_stored_item", "convert_to_responses_payload")


def converter():
    """The package's function that makes a payload of Responses."""
    tree = ast.parse(Path(str(ROUTER)).read_text())
    tree.body = [node for node in tree.body if _name(node) in WANTED]
    scope = {"get_provider_function": lambda item: {}}
    exec(compile(tree, str(ROUTER), "exec"), scope)
    return scope["convert_to_responses_payload"]


def _name(node: ast.stmt) -> str:
    target = node.target if isinstance(node, ast.AnnAssign) else node
    return getattr(target, "name", getattr(target, "id", ""))


def call(path: str, body: dict | None = None, key: str = steps.KEY) -> str:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{steps.URL}/v1{path}", data, headers)) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code} {error.read().decode()}") from None


def payload(*messages: dict, **more: object) -> dict:
    given = {
        "stream": True,
        "model": steps.MODEL,
        "messages": list(messages),
        "stream_options": {"include_usage": True},
    }
    return given | more


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def events(text: str) -> list[dict]:
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for one in found:
        if one.get("error") or one.get("type") == "response.failed":
            raise RuntimeError(json.dumps(one))
    return found


def streamed(**asked: object) -> str:
    chunks = events(call("/chat/completions", asked))
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def whole(**asked: object) -> dict:
    asked = {name: value for name, value in asked.items() if name != "stream_options"} | {"stream": False}
    return json.loads(call("/chat/completions", asked))["choices"][0]["message"]


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": steps.WEATHER}


def of_chat() -> dict:
    def tools() -> None:
        asked = payload(user(steps.CALL), tools=steps.TOOLS)
        calls = [
            call
            for chunk in events(call("/chat/completions", asked))
            for choice in chunk["choices"]
            for call in choice["delta"].get("tool_calls") or []
        ]
        steps.expect("".join(one["function"].get("arguments") or "" for one in calls), '{"city": "Paris"}')
        steps.expect(streamed(**payload(user(steps.CALL), CALLED, RESULT, tools=steps.TOOLS)), steps.SAID)

    titles = {"max_tokens": 1000, "temperature": 0.1}  # of titles, tags, follow-ups
    return {
        "turn": lambda: steps.expect(whole(**payload(user(steps.HELLO), **titles))["content"], "Hello there."),
        "stream": lambda: steps.expect(streamed(**payload(user(steps.HELLO))), "Hello there."),
        "streamed tools": tools,
        "second turn": lambda: steps.expect(
            streamed(**payload(user(steps.HELLO), {"role": "assistant", "content": "Hello there."}, user(steps.AGAIN))),
            "It goes on.",
        ),
        "cut stream": lambda: steps.fails(lambda: streamed(**payload(user(steps.CUT)))),
        "wrong key": lambda: steps.fails(lambda: call("/models", key="sk-wrong"), "401"),
        "too long": lambda: steps.fails(lambda: streamed(**payload(user(steps.LONG))), "400", "context"),
        "models": lambda: steps.expect(json.loads(call("/models"))["data"][0]["id"], steps.MODEL),
    }


def of_responses() -> dict:
    convert = converter()

    def said(*messages: dict, **more: object) -> str:
        found = events(call("/responses", convert(payload(*messages, **more))))
        return "".join(one["delta"] for one in found if one["type"] == "response.output_text.delta")

    system = {"role": "system", "content": "Help."}
    return {
        "stream": lambda: steps.expect(said(system, user(steps.HELLO), stop=["@"]), "Hello there."),
        "streamed tools": lambda: steps.expect(said(user(steps.CALL), CALLED, RESULT, tools=steps.TOOLS), steps.SAID),
        "second turn": lambda: steps.expect(
            said(user(steps.HELLO), {"role": "assistant", "content": "Hello there."}, user(steps.AGAIN)), "It goes on."
        ),
        "cut stream": lambda: steps.fails(lambda: said(user(steps.CUT))),
    }


steps.run(chat=of_chat(), responses=of_responses())

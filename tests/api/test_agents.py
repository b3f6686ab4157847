"""Coding agents that people have, from npm and PyPI, against a server whose engine says what the prompt tells it to.

The prompts of an agent have tens of thousands of characters, so the base is a tiny one with a long context. The results
are written to `real_clients/results.json`, of which docs/compatibility.md has a table.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from client_environments import RegistryError, installed_version, make_environment, newest_node, npm_install
from client_results import record, take
from client_site import Recorder, client_site, tool_call
from site_fixture import Site

pytestmark = pytest.mark.slow

PATIENCE = 300
SECRET = "halkodel-4711"
"""The content of a file, which only the agent's tool can have read."""
OFFLINE = {"CI": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
HELLO, AGAIN = "Say <<Hello there.>>", "Say <<It goes on.>>"
CUT, BUSY = "Say <<cut:Hello th>>", "Say <<busy:Here again.>>"
LONG = "x" * 420_000
THOUGHT = "Say <<<think>so it is</think>A thought.>>"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

CODEX_MODEL = {
    **{"slug": "tiny", "display_name": "tiny", "description": "tiny", "visibility": "list", "supported_in_api": True},
    **{"default_reasoning_level": "low", "supported_reasoning_levels": [{"effort": "low", "description": "low"}]},
    **{"shell_type": "unified_exec", "priority": 0, "availability_nux": None, "upgrade": None},
    **{"base_instructions": "Help.", "supports_reasoning_summaries": False, "support_verbosity": False},
    **{"default_verbosity": None, "apply_patch_tool_type": None, "web_search_tool_type": "text"},
    **{"truncation_policy": {"mode": "bytes", "limit": 10_000}, "supports_parallel_tool_calls": True},
    **{"context_window": 350_000, "max_context_window": 350_000, "auto_compact_token_limit": None},
    **{"effective_context_window_percent": 95, "experimental_supported_tools": [], "input_modalities": ["text"]},
    **{"supports_search_tool": True, "supports_image_detail_original": False, "use_responses_lite": False},
}
"""A model of Codex' catalog that can search for tools."""
MCP_SERVER = """
import json, sys
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "weather", "description": "The weather of a city.", "inputSchema": schema}]
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        version = asked.get("params", {}).get("protocolVersion")
        about = {"protocolVersion": version, "capabilities": {"tools": {}}}
        about["serverInfo"] = {"name": "sky", "version": "1"}
        result = {"initialize": about, "tools/list": {"tools": tools}}.get(asked["method"], {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""
"""An MCP server with one tool, which Codex starts."""

Served = tuple[Site, Recorder]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with client_site(tmp_path_factory.mktemp("agents")) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@dataclass
class Agent:
    """An installed agent in a separate folder with a text and an image."""

    command: list[str]
    version: str
    home: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, said: str = "", **more: str) -> tuple[int, str, str]:
        """Run the agent, with `said` as its input; return its exit code and what it prints."""
        environment = os.environ | OFFLINE | {"HOME": str(self.home), "PWD": str(self.folder)} | self.environment | more
        done = subprocess.run(
            [*self.command, *arguments], cwd=self.folder, env=environment, input=said,
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def lines(self, *arguments: str, said: str = "", **more: str) -> list[dict[str, Any]]:
        """Run the agent, and return the lines of JSON that it prints."""
        code, out, err = self.run(*arguments, said=said, **more)
        found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert found, f"{code}: {(out + err)[-2000:]}"
        return found


def agent_of(folder: Path, command: list[str], version: str, **environment: str) -> Agent:
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text(f"{SECRET}\n")
    (work / "pixel.png").write_bytes(base64.b64decode(PIXEL))
    subprocess.run(["git", "init", "--quiet"], cwd=work, check=False)
    return Agent(command, version, home, work, environment)


def from_npm(folder: Path, package: str, program: str, *, newest: bool = False, **environment: str) -> Agent:
    """Install an agent. `newest`: run it by a newer Node.js than the machine's."""
    try:
        version = npm_install(folder, package)[package]
        node = [str(newest_node(folder / "node"))] if newest else []
    except RegistryError as error:
        pytest.skip(f"npm cannot install {package}: {error}")
    return agent_of(folder, [*node, str(folder / "node_modules" / ".bin" / program)], version, **environment)


def expect(found: object, wanted: object) -> None:
    assert found == wanted, f"{found!r} is not {wanted!r}"


def test_claude_code_takes_every_step(served: Served, folder: Path) -> None:
    site, recorder = served
    agent = from_npm(
        folder, "@anthropic-ai/claude-code", "claude",
        ANTHROPIC_BASE_URL=site.url, ANTHROPIC_AUTH_TOKEN=site.keys["acme"], ANTHROPIC_MODEL="tiny",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="tiny", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1",
        CLAUDE_CODE_MAX_RETRIES="2",
    )  # fmt: skip
    recorder.sent.clear()

    def ask(text: str, *arguments: str, **more: str) -> dict[str, Any]:
        return agent.lines("-p", *arguments, "--output-format", "json", said=text, **more)[-1]

    def says(text: str, wanted: str, *arguments: str, **more: str) -> dict[str, Any]:
        found = ask(text, *arguments, **more)
        expect((found["result"], found["is_error"]), (wanted, False))
        return found

    def refused(text: str, *words: str, **more: str) -> None:
        found = ask(text, "--allowedTools", "Read", **more)
        assert found["is_error"], found
        assert all(word in found["result"] for word in words), found["result"]

    read = tool_call("Read", {"file_path": str(agent.folder / "note.txt")})
    see = tool_call("Read", {"file_path": str(agent.folder / "pixel.png")})
    find = tool_call("ToolSearch", {"query": "select:WebFetch", "max_results": 3})

    def tools() -> None:
        found = ask(f"Use it: {read}", "--allowedTools", "Read")
        assert SECRET in found["result"], found
        says(AGAIN, "It goes on.", "--resume", found["session_id"])

    def thoughts() -> None:
        id = says(THOUGHT, "A thought.")["session_id"]
        says(AGAIN, "It goes on.", "--resume", id)
        blocks = [block for turn in recorder.sent[-1].json["messages"] for block in turn["content"]]
        assert [one["thinking"] for one in blocks if isinstance(one, dict) and one["type"] == "thinking"] == [
            "so it is"
        ]

    def compacts() -> None:
        id = says("Say <<Kept.>> " + "x " * 160_000, "Kept.")["session_id"]
        says("Say <<After.>> " + "y " * 40_000, "After.", "--resume", id)
        statuses = [one.status for one in recorder.sent[-4:]]
        assert 400 in statuses, statuses
        assert len(recorder.sent[-1].body) < 300_000, "the conversation was not made shorter"

    steps = {
        "turn": lambda: says(HELLO, "Hello there.") and None,
        "tools": tools,
        "second turn": thoughts,
        "cut stream": lambda: refused(CUT, "the engine has failed"),
        "busy": lambda: says(BUSY, "Here again.") and None,
        "wrong key": lambda: refused(HELLO, "401 Incorrect API key", ANTHROPIC_AUTH_TOKEN="sk-wrong"),
        "too long": lambda: refused(LONG, "Prompt is too long"),
        "thoughts sent back": thoughts,
        "tool search": lambda: says(
            f"Use it: {find}", 'It says {"type":"tool_reference","tool_name":"WebFetch"}', ENABLE_TOOL_SEARCH="true"
        ) and None,
        "compaction": compacts,
        "image refused": lambda: refused(f"Use it: {see}", "400", "'image'", "reads text only"),
    }  # fmt: skip
    record("Claude Code", agent.version, {"messages": take(steps)}, recorder.sent)


def test_codex_takes_every_step(served: Served, folder: Path) -> None:
    site, recorder = served
    agent = from_npm(folder, "@openai/codex", "codex", LORAMUX_KEY=site.keys["acme"])
    agent.environment["CODEX_HOME"] = str(agent.home)
    provider = '[model_providers.loramux]\nname = "loramux"\n'
    (agent.home / "config.toml").write_text(
        f'model = "tiny"\nmodel_provider = "loramux"\n{provider}'
        f'base_url = "{site.url}/v1"\nenv_key = "LORAMUX_KEY"\nwire_api = "responses"\n'
        "request_max_retries = 2\nstream_max_retries = 1\n"
    )
    recorder.sent.clear()

    def ask(*arguments: str, **more: str) -> list[dict[str, Any]]:
        *given, text = arguments
        return agent.lines("exec", "--skip-git-repo-check", "--json", *given, "-", said=text, **more)

    def items(*arguments: str, **more: str) -> list[dict[str, Any]]:
        events = ask(*arguments, **more)
        assert events[-1]["type"] == "turn.completed", events
        return [event["item"] for event in events if event["type"] == "item.completed"]

    def says(wanted: str, *arguments: str, **more: str) -> None:
        expect(items(*arguments, **more)[-1]["text"], wanted)

    def refused(text: str, *words: str, **more: str) -> None:
        events = ask(text, **more)
        assert events[-1]["type"] == "turn.failed", events
        said = json.dumps(events)
        assert all(word in said for word in words), said[-1500:]

    def tools() -> None:
        found = items(f"Use it: {tool_call('exec_command', {'cmd': 'cat note.txt'})}")
        expect([one["exit_code"] for one in found if one["type"] == "command_execution"], [0])
        assert SECRET in found[-1]["text"], found

    def second_turn() -> None:
        says("A thought.", THOUGHT)
        says("It goes on.", "resume", "--last", AGAIN)

    def finds_tools() -> None:
        """The catalog says that the model can search for the tools of an MCP server, which are not in the request."""
        (agent.home / "catalog.json").write_text(json.dumps({"models": [CODEX_MODEL]}))
        (agent.home / "sky.py").write_text(MCP_SERVER)
        with (agent.home / "config.toml").open("a") as file:
            file.write(
                "[features]\ntool_search = true\ntool_search_always_defer_mcp_tools = true\n"
                f'[mcp_servers.sky]\ncommand = "{sys.executable}"\nargs = ["{agent.home}/sky.py"]\n'
            )
        search = tool_call("tool_search", {"query": "weather"})
        found = items("-c", f'model_catalog_json="{agent.home}/catalog.json"', f"Use it: {search}")
        assert "mcp__sky__weather" in found[-1]["text"], found

    def compacts() -> None:
        says("Kept.", "Say <<Kept.>> " + "x " * 12_000)
        before = len(recorder.sent)
        says("It goes on.", "-c", "model_auto_compact_token_limit=20000", "resume", "--last", AGAIN)
        assert len(recorder.sent) == before + 2, "a summary was not asked for"

    def image() -> None:
        events = ask("--image", str(agent.folder / "pixel.png"), HELLO)
        assert "input_image" in json.dumps(events) or "text only" in json.dumps(events), events

    steps = {
        "turn": lambda: says("Hello there.", HELLO),
        "tools": tools,
        "second turn": second_turn,
        "cut stream": lambda: refused(CUT, "the engine has failed"),
        "busy": lambda: says("Here again.", BUSY),
        "wrong key": lambda: refused(HELLO, "401", LORAMUX_KEY="sk-wrong"),
        "too long": lambda: refused(LONG, "context"),
        "image refused": image,
        "compaction": compacts,
        "tool search": finds_tools,
    }
    record("Codex", agent.version, {"responses": take(steps)}, recorder.sent)


def test_opencode_takes_every_step(served: Served, folder: Path) -> None:
    site, recorder = served
    agent = from_npm(
        folder, "opencode-ai", "opencode", OPENCODE_DISABLE_AUTOUPDATE="1", OPENCODE_DISABLE_MODELS_FETCH="1"
    )
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{site.url}/v1", "apiKey": "{env:LORAMUX_KEY}"},
        "models": {"tiny": {"name": "tiny"}},
    }
    settings = {"provider": {"loramux": provider}, "model": "loramux/tiny", "small_model": "loramux/tiny"}
    (agent.folder / "opencode.json").write_text(json.dumps(settings | {"autoupdate": False}))
    recorder.sent.clear()

    def ask(text: str, *arguments: str, key: str = site.keys["acme"]) -> list[dict[str, Any]]:
        return agent.lines("run", "--format", "json", *arguments, said=text, LORAMUX_KEY=key)  # arguments are quoted

    def said(events: list[dict[str, Any]]) -> str:
        return "".join(event["part"]["text"] for event in events if event["type"] == "text").strip()

    def tools() -> None:
        found = ask(f"Use it: {tool_call('read', {'filePath': str(agent.folder / 'note.txt')})}")
        assert SECRET in said(found), found
        expect(said(ask(AGAIN, "--continue")), "It goes on.")

    def fails(text: str, *words: str, **more: str) -> None:
        found = json.dumps(ask(text, **more))
        assert '"error"' in found, found[-1500:]
        assert all(word in found for word in words), found[-1500:]

    steps = {
        "turn": lambda: expect(said(ask(HELLO)), "Hello there."),
        "tools": tools,
        "second turn": lambda: expect(said(ask(AGAIN, "--continue")), "It goes on."),
        "busy": lambda: expect(said(ask(BUSY)), "Here again."),
        "wrong key": lambda: fails(HELLO, "Incorrect API key", key="sk-wrong"),
    }
    record("OpenCode", agent.version, {"chat": take(steps)}, recorder.sent)


def test_continue_takes_every_step(served: Served, folder: Path) -> None:
    site, recorder = served
    agent = from_npm(folder, "@continuedev/cli", "cn", newest=True)

    def settings(key: str) -> str:
        path = agent.folder / f"{'right' if key.startswith('sk-lm') else 'wrong'}.yaml"
        model = {"name": "tiny", "provider": "openai", "model": "tiny", "apiBase": f"{site.url}/v1", "apiKey": key}
        path.write_text(json.dumps({"name": "loramux", "version": "1.0.0", "schema": "v1", "models": [model]}))
        return str(path)

    recorder.sent.clear()

    def ask(text: str, *arguments: str, key: str = site.keys["acme"]) -> str:
        code, out, err = agent.run("--config", settings(key), "-p", *arguments, text)
        assert out, f"{code}: {err[-1500:]}"
        return out.strip()

    def tools() -> None:
        said = ask(f"Use it: {tool_call('Read', {'filepath': str(agent.folder / 'note.txt')})}")
        assert SECRET in said, said

    def wrong_key() -> None:
        code, out, err = agent.run("--config", settings("sk-wrong"), "-p", HELLO)
        assert code, out
        assert "Incorrect API key" in out + err, (out + err)[-1500:]

    steps = {
        "turn": lambda: expect(ask(HELLO), "Hello there."),
        "tools": tools,
        "second turn": lambda: expect(ask(AGAIN, "--resume"), "It goes on."),
        "wrong key": wrong_key,
    }
    record("Continue", agent.version, {"chat": take(steps)}, recorder.sent)


def test_cline_takes_every_step(served: Served, folder: Path) -> None:
    """Over the two APIs for which it takes a URL."""
    site, recorder = served
    agent = from_npm(folder, "cline", "cline", CLINE_TELEMETRY_DISABLED="1")
    recorder.sent.clear()

    def of(provider: str) -> dict[str, str]:
        def use(key: str) -> None:
            code, out, err = agent.run("auth", "-p", provider, "-k", key, "-b", f"{site.url}/v1", "-m", "tiny")
            assert code == 0, out + err

        def says(text: str, words: str) -> None:
            found = agent.lines("--json", "-P", provider, "-m", "tiny", "--retries", "1", text)[-1]
            assert words in found.get("text", found.get("message")), found

        def wrong_key() -> None:
            use("sk-wrong")
            says(HELLO, "Incorrect API key")

        use(site.keys["acme"])
        read = tool_call("read_files", {"files": [{"path": str(agent.folder / "note.txt")}]})
        steps = {
            "turn": lambda: says(HELLO, "Hello there."),
            "tools": lambda: says(f"Use it: {read}", SECRET),
            "cut stream": lambda: says(CUT, "the engine has failed"),
            "busy": lambda: says(BUSY, "Here again."),
            "wrong key": wrong_key,
        }
        return take(steps)

    results = {"chat": of("openai-compatible"), "responses": of("openai-native")}
    agent.run("hub", "stop")  # a daemon that the first session started
    record("Cline", agent.version, results, recorder.sent)


def test_qwen_code_takes_every_step(served: Served, folder: Path) -> None:
    """Over the three APIs that it knows."""
    site, recorder = served
    agent = from_npm(folder, "@qwen-code/qwen-code", "qwen", newest=True, QWEN_TELEMETRY_ENABLED="false")
    recorder.sent.clear()

    def of(kind: str, prefix: str, url: str) -> dict[str, str]:
        def ask(text: str, *arguments: str, key: str = site.keys["acme"]) -> str:
            given = {f"{prefix}_API_KEY": key, f"{prefix}_BASE_URL": url, f"{prefix}_MODEL": "tiny"}
            _, out, err = agent.run("--auth-type", kind, "--model", "tiny", "--yolo", *arguments, said=text, **given)
            return (out + err).strip()

        def says(text: str, words: str, *arguments: str, **more: str) -> None:
            found = ask(text, *arguments, **more)
            assert words in found, found[-1500:]

        read = tool_call("read_file", {"file_path": str(agent.folder / "note.txt")})
        steps = {
            "turn": lambda: says(HELLO, "Hello there."),
            "tools": lambda: says(f"Use it: {read}", SECRET),
            "second turn": lambda: says(AGAIN, "It goes on.", "--continue"),
            "wrong key": lambda: says(HELLO, "Incorrect API key", key="sk-wrong"),
        }
        return take(steps)

    results = {
        "chat": of("openai", "OPENAI", f"{site.url}/v1"),
        "responses": of("openai-responses", "OPENAI", f"{site.url}/v1"),
        "messages": of("anthropic", "ANTHROPIC", site.url),
    }
    record("Qwen Code", agent.version, results, recorder.sent)


def test_pi_takes_every_step(served: Served, folder: Path) -> None:
    """Over the three APIs that it knows."""
    site, recorder = served
    agent = from_npm(folder, "@mariozechner/pi-coding-agent", "pi", newest=True, PI_OFFLINE="1")
    routes = {
        "chat": ("openai-completions", f"{site.url}/v1"),
        "responses": ("openai-responses", f"{site.url}/v1"),
        "messages": ("anthropic-messages", site.url),
    }
    model = {"id": "tiny", "contextWindow": 400_000, "maxTokens": 4096, "reasoning": False, "input": ["text"]}
    providers = {
        f"{name}{suffix}": {"baseUrl": url, "api": api, "apiKey": key, "models": [model]}
        for name, (api, url) in routes.items()
        for suffix, key in {"": site.keys["acme"], "-wrong": "sk-wrong"}.items()
    }
    settings = agent.home / ".pi" / "agent"
    settings.mkdir(parents=True)
    (settings / "models.json").write_text(json.dumps({"providers": providers}))
    recorder.sent.clear()

    def of(name: str) -> dict[str, str]:
        def says(text: str, words: str, *arguments: str, provider: str = name) -> None:
            _, out, err = agent.run("--provider", provider, "--model", "tiny", "-p", *arguments, text)
            assert words in out + err, (out + err)[-1500:]

        read = tool_call("read", {"path": str(agent.folder / "note.txt")})
        steps = {
            "turn": lambda: says(HELLO, "Hello there."),
            "tools": lambda: says(f"Use it: {read}", SECRET),
            "second turn": lambda: says(AGAIN, "It goes on.", "--continue"),
            "cut stream": lambda: says(CUT, "the engine has failed"),
            "wrong key": lambda: says(HELLO, "Incorrect API key", provider=f"{name}-wrong"),
        }
        return take(steps)

    record("pi", agent.version, {name: of(name) for name in routes}, recorder.sent)


def test_aider_takes_every_step(served: Served, folder: Path) -> None:
    site, recorder = served
    try:
        programs = make_environment(folder / "environment", "aider-chat")
    except RegistryError as error:
        pytest.skip(f"aider cannot be installed here: {error}")
    quiet = (
        "--no-git --yes-always --no-check-update --no-show-model-warnings --analytics-disable --no-pretty "
        "--no-show-release-notes --edit-format whole --model openai/tiny --timeout 30"
    )
    command = [str(programs / "aider"), *quiet.split()]
    agent = agent_of(
        folder, command, installed_version(programs, "aider-chat"),
        OPENAI_API_BASE=f"{site.url}/v1", OPENAI_API_KEY=site.keys["acme"], LITELLM_LOCAL_MODEL_COST_MAP="True",
    )  # fmt: skip
    recorder.sent.clear()

    def ask(text: str, *arguments: str, **more: str) -> str:
        _, out, err = agent.run(*arguments, "--message", text, **more)
        return " ".join((out + err).split())  # it breaks lines

    def says(text: str, *words: str, **more: str) -> None:
        found = ask(text, **more)
        assert all(word in found for word in words), found[-1500:]

    def edits() -> None:
        ask("Say <<hello.txt\n```\nHello from aider.\n```>>", "hello.txt")
        expect((agent.folder / "hello.txt").read_text(), "Hello from aider.\n")

    def second_turn() -> None:
        found = ask(AGAIN, "--restore-chat-history")
        assert "It goes on." in found, found[-1500:]
        assert any(turn["role"] == "assistant" for turn in recorder.sent[-1].json["messages"])

    steps = {
        "turn": lambda: says("Say <<Hello there.>>", "Hello there."),
        "stream": lambda: expect([one.json["stream"] for one in recorder.sent], [True]),
        "tools": edits,
        "second turn": second_turn,
        "busy": lambda: says(BUSY, "Here again."),
        "wrong key": lambda: says(HELLO, "Incorrect API key", OPENAI_API_KEY="sk-wrong"),
    }
    record("aider", agent.version, {"chat": take(steps)}, recorder.sent)

"""Coding agents that people have, from npm, against a server whose engine says what an agent needs to go on.

Each agent makes a plain turn, a round trip with one of its tools, and a second turn with its history. Its prompts have
tens of thousands of characters, so the base is a tiny one with a long context.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chat_site import chat_site
from scripted_engine import EOS
from site_fixture import Site

pytestmark = pytest.mark.slow

PATIENCE = 300
CONTEXT = 400_000
SECRET = "halkodel-4711"
"""The content of a file, which only the agent's tool can have read."""
OFFLINE = {"CI": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with chat_site(tmp_path_factory.mktemp("agents"), context=CONTEXT) as made:
        yield made


@dataclass
class Agent:
    """An installed agent in a separate folder with one file."""

    program: Path
    home: Path
    folder: Path
    environment: dict[str, str]

    def run(self, *arguments: str) -> str:
        environment = os.environ | OFFLINE | {"HOME": str(self.home)} | self.environment
        done = subprocess.run(
            [str(self.program), *arguments],
            cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout


def install(folder: Path, package: str, program: str, **environment: str) -> Agent:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    done = subprocess.run(
        ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(folder), package],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"npm cannot install {package}: {done.stderr[-400:]}")
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (work / "note.txt").write_text(f"{SECRET}\n")
    return Agent(folder / "node_modules" / ".bin" / program, home, work, environment)


def say(site: Site, tool: str, arguments: dict[str, Any]) -> None:
    """Have the engine call the tool at the word "read", and repeat the secret as soon as the prompt has it."""
    call = json.dumps({"name": tool, "arguments": arguments})

    def script(request: Any) -> list[int]:
        prompt = bytes(token for token in request.prompt_token_ids if token < EOS).decode(errors="replace")
        answer = "Hello."
        if SECRET in prompt:
            answer = f"<think>so</think>It says {SECRET}."
        elif "please read" in prompt:
            answer = f"I look.<tool_call>{call}</tool_call>"
        return [*answer.encode(), EOS]

    site.engine.requests.clear()
    site.engine.script = script


def test_claude_code_turns_reads_a_file_and_goes_on(served: Site, tmp_path: Path) -> None:
    agent = install(
        tmp_path, "@anthropic-ai/claude-code", "claude",
        ANTHROPIC_BASE_URL=served.url, ANTHROPIC_AUTH_TOKEN=served.keys["acme"], ANTHROPIC_MODEL="tiny",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="tiny", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1",
    )  # fmt: skip
    say(served, "Read", {"file_path": str(agent.folder / "note.txt")})

    def ask(*arguments: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(agent.run("-p", *arguments, "--output-format", "json"))
        assert not found["is_error"], found
        return found

    assert ask("say hello")["result"] == "Hello."
    read = ask("please read note.txt", "--allowedTools", "Read")
    assert (read["result"], read["num_turns"]) == (f"It says {SECRET}.", 2)
    assert ask("and again", "--resume", read["session_id"])["result"] == f"It says {SECRET}."


def test_codex_turns_runs_a_command_and_goes_on(served: Site, tmp_path: Path) -> None:
    agent = install(tmp_path, "@openai/codex", "codex", LORAMUX_KEY=served.keys["acme"])
    agent.environment["CODEX_HOME"] = str(agent.home)
    (agent.home / "config.toml").write_text(
        'model = "tiny"\nmodel_provider = "loramux"\n[model_providers.loramux]\nname = "loramux"\n'
        f'base_url = "{served.url}/v1"\nenv_key = "LORAMUX_KEY"\nwire_api = "responses"\n'
    )
    say(served, "exec_command", {"cmd": "cat note.txt"})

    def ask(*arguments: str) -> list[dict[str, Any]]:
        said = agent.run("exec", "--skip-git-repo-check", "--json", *arguments)
        events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert events[-1]["type"] == "turn.completed", events
        return [event["item"] for event in events if event["type"] == "item.completed"]

    assert ask("say hello")[-1]["text"] == "Hello."
    items = ask("please read note.txt")
    assert [one["exit_code"] for one in items if one["type"] == "command_execution"] == [0]
    assert items[-1]["text"] == f"It says {SECRET}."
    assert ask("resume", "--last", "and again")[-1]["text"] == f"It says {SECRET}."

"""Published clients, each at its newest version in a separate environment, through the steps of its script.

The results are written to `real_clients/results.json`, of which docs/compatibility.md has a table, and the forms of the
bodies to `real_clients/bodies`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from client_environments import (
    RegistryError,
    installed_version,
    make_environment,
    newest_node,
    npm_install,
    python_of,
    shell,
)
from client_results import FOLDER, Results, record
from client_site import Recorder, client_site
from peft_uploads import make_adapter
from running_server import free_port
from site_fixture import Site

pytestmark = pytest.mark.slow

PATIENCE = 600
PYTHON = {
    "steps_openai_agents.py": ("OpenAI Agents SDK", ("openai-agents",)),
    "steps_pydantic_ai.py": ("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]",)),
    "steps_langgraph.py": ("LangGraph", ("langgraph", "langchain", "langchain-openai", "langchain-anthropic")),
    "steps_smolagents.py": ("smolagents", ("smolagents[openai]",)),
    "steps_instructor.py": ("instructor", ("instructor", "anthropic")),
    "steps_llama_index.py": (
        "LlamaIndex",
        ("llama-index-core", "llama-index-llms-openai-like", "llama-index-llms-openai"),
    ),
    "steps_litellm.py": ("LiteLLM", ("litellm",)),
    "steps_open_webui.py": ("Open WebUI", ("open-webui", "--no-deps")),
    "steps_haystack.py": ("Haystack", ("haystack-ai",)),
    "steps_dspy.py": ("DSPy", ("dspy", "litellm")),
    "steps_crewai.py": ("CrewAI", ("crewai",)),
    "steps_autogen.py": ("AutoGen", ("autogen-agentchat", "autogen-ext[openai]")),
    "steps_semantic_kernel.py": ("Semantic Kernel", ("semantic-kernel",)),
    "steps_agent_framework.py": (
        "Microsoft Agent Framework",
        ("agent-framework-core", "agent-framework-openai", "agent-framework-anthropic"),
    ),
    "steps_agno.py": ("Agno", ("agno", "openai", "anthropic", "sqlalchemy")),
    "steps_strands.py": ("Strands Agents", ("strands-agents[openai,anthropic]",)),
    "steps_google_adk.py": ("Google ADK", ("google-adk", "litellm")),
    "steps_inspect.py": ("Inspect", ("inspect-ai", "openai", "anthropic")),
    "steps_mistral.py": ("Mistral's client", ("mistralai", "pydantic")),
    "steps_openhands.py": ("OpenHands", ("openhands-sdk", "openhands-tools")),
}
"""The clients' names and packages, by script; the first package has the version that is shown."""
PYTHONS = {"steps_openhands.py": "3.12"}
"""Versions of Python that clients need, if the tests' own is too old."""
JAVASCRIPT = {
    "steps_ai_sdk.mjs": (
        "Vercel AI SDK",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod@4"),
    ),
    "steps_openai_agents_js.mjs": ("OpenAI Agents SDK (JavaScript)", ("@openai/agents", "openai", "zod@4")),
    "steps_langchain_js.mjs": (
        "LangChain.js",
        ("langchain", "@langchain/core", "@langchain/openai", "@langchain/anthropic", "zod@4"),
    ),
    "steps_llama_index_js.mjs": (
        "LlamaIndex.TS",
        ("llamaindex", "@llamaindex/openai", "@llamaindex/workflow", "zod@3"),
    ),
}

Served = tuple[Site, Recorder]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with client_site(tmp_path_factory.mktemp("clients")) as made:
        settings = made[0].settings
        make_adapter(Path(settings.model.path), Path(str(settings.adapters.local_root)) / "policy")
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def results_of(site: Site, *command: str, **more: str) -> Results:
    """Run a script, and return what its last line says."""
    facts = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    facts |= {"URL": site.url, "KEY": site.keys["acme"], "PYTHONPATH": str(FOLDER)} | more
    facts |= {"OPERATOR": site.keys["all-scopes"], "ADAPTER": f"{site.settings.adapters.local_root}/policy"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=facts, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found: Results = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("script", PYTHON)
def test_python_client_takes_every_step(served: Served, folder: Path, script: str) -> None:
    (site, recorder), (client, packages) = served, PYTHON[script]
    try:
        python = python_of(PYTHONS[script]) if script in PYTHONS else sys.executable
        programs = make_environment(folder / "environment", *packages, python=python)
    except RegistryError as error:
        pytest.skip(f"{client} cannot be installed here: {error}")
    recorder.sent.clear()
    results = results_of(site, str(programs / "python"), str(FOLDER / script))
    record(client, installed_version(programs, packages[0].partition("[")[0]), results, recorder.sent)


def test_trl_takes_every_step(served: Served, folder: Path) -> None:
    """It is installed next to this Python's packages, which have torch and transformers."""
    (site, recorder), packages = served, folder / "packages"
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages))
    try:
        shell(*install, "--no-deps", "trl")
        shell(*install, "aiohttp", "requests")
    except RegistryError as error:
        pytest.skip(f"TRL cannot be installed here: {error}")
    path = os.pathsep.join((str(FOLDER), str(packages)))
    recorder.sent.clear()
    results = results_of(site, sys.executable, str(FOLDER / "steps_trl.py"), PYTHONPATH=path)
    [installed] = packages.glob("trl-*.dist-info")
    record("TRL", installed.name.removeprefix("trl-").removesuffix(".dist-info"), results, recorder.sent)


def test_litellm_proxy_takes_every_step(served: Served, folder: Path) -> None:
    site, recorder = served
    try:
        programs = make_environment(folder / "environment", "litellm[proxy]")
    except RegistryError as error:
        pytest.skip(f"LiteLLM's proxy cannot be installed here: {error}")
    routes = {"chat": "openai/tiny", "responses": "openai/responses/tiny", "messages": "anthropic/tiny"}
    keys = {"": site.keys["acme"], "-wrong": "sk-wrong"}
    models = [
        {
            "model_name": f"{name}{suffix}",
            "litellm_params": {
                "model": model, "api_key": key, "api_base": site.url if name == "messages" else f"{site.url}/v1",
            },
        }
        for name, model in routes.items()
        for suffix, key in keys.items()
    ]  # fmt: skip
    settings = {"model_list": models, "litellm_settings": {"num_retries": 0}}
    (folder / "config.yaml").write_text(json.dumps(settings | {"general_settings": {"master_key": "sk-proxy"}}))
    port = free_port()
    command = [str(programs / "litellm"), "--config", str(folder / "config.yaml"), "--port", str(port)]
    recorder.sent.clear()
    with (folder / "log").open("w") as log:
        proxy = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=log, stderr=log, cwd=folder)
    try:
        wait_until(f"http://127.0.0.1:{port}/health/liveliness", proxy, folder / "log")
        script = str(FOLDER / "steps_litellm_proxy.py")
        results = results_of(site, str(programs / "python"), script, PROXY=f"http://127.0.0.1:{port}")
    finally:
        proxy.kill()
        proxy.wait()
    record("LiteLLM proxy", installed_version(programs, "litellm"), results, recorder.sent)


def wait_until(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until `url` answers 200."""
    deadline = time.monotonic() + PATIENCE
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)


@pytest.mark.parametrize("script", JAVASCRIPT)
def test_javascript_client_takes_every_step(served: Served, folder: Path, script: str) -> None:
    (site, recorder), (client, packages) = served, JAVASCRIPT[script]
    try:
        node = newest_node(folder / "node")
        versions = npm_install(folder, *packages)
        shell(str(node), "--version")
    except RegistryError as error:
        pytest.skip(f"npm cannot install {packages}: {error}")
    for name in ("steps.mjs", script):
        shutil.copy(FOLDER / name, folder)
    recorder.sent.clear()
    results = results_of(site, str(node), str(folder / script))
    record(client, versions[packages[0]], results, recorder.sent)

"""A pytest plugin with which vLLM's tests start this server: it replaces `tests.utils` and vLLM's modules."""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import json
import os
import socket
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import requests
from lessons import lessons
from model import make_adapter, make_base, make_taught, with_context, with_template
from transformers import AutoTokenizer

FOLDER = Path(os.environ["VLLM_TESTS_FOLDER"])
BASE = FOLDER / "base"
TAUGHT = FOLDER / "taught"
ADAPTERS = FOLDER / "adapters"
TENANT = "vllm"
START_SECONDS = 300
HTTP_FIXTURES = {"client", "server", "server_fixture", "server_with_lora_modules_json", "tool_use_client"}
HTTP_TESTS = {"test_empty_prompt", "test_out_of_vocab_token_ids"}
"""Tests that start a server themselves."""

TALKERS = {"HuggingFaceH4/zephyr-7b-beta"}
"""Models of which tests expect certain answers. Tests of servers with tools also expect certain answers."""
IS_TAUGHT = os.environ["VLLM_TESTS_MODELS"] == "taught"
PARSERS = {
    "hermes": "hermes",
    "llama3_json": "llama3",
    "mistral": "mistral",
    "granite": "granite",
    "granite4": "hermes",
    "pythonic": "pythonic",
}
"""loramux's names for the notations of vLLM's parsers; vLLM has further parsers."""

outcomes: dict[str, str] = {}
files_with_lessons: set[str] = set()
"""Files of tests that started a server and expect certain answers of it."""


class RemoteOpenAIServer:
    """This server in a separate process, with the arguments of vLLM that it supports."""

    keys: ClassVar[dict[int, str]] = {}
    """API keys by port."""

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, **_: Any
    ) -> None:
        self.model = model
        arguments = [str(argument) for argument in vllm_serve_args]
        self.host, self.port = "127.0.0.1", free_port()
        length = int(value_of(arguments, "--max-model-len", "2048"))
        self.root_path = value_of(arguments, "--root-path", "")
        self.given_key = (env_dict or {}).get("VLLM_API_KEY")
        """The key that the test chose, because this server makes its own key."""
        expects_answers = "--enable-auto-tool-choice" in arguments or model in TALKERS
        if expects_answers:
            files_with_lessons.add(current_file())
        is_taught = expects_answers and IS_TAUGHT
        self._folder = Path(os.path.realpath(FOLDER)) / f"server-{self.port}"
        self._folder.mkdir()
        model_folder = with_context(taught() if is_taught else base(), length)
        if template := value_of(arguments, "--chat-template", ""):
            model_folder = with_context(
                taught() if is_taught else base(), 2 * length
            )  # this tokenizer cuts texts into more tokens
            model_folder = with_template(model_folder, Path(template))
        self._parser = PARSERS.get(value_of(arguments, "--tool-call-parser", "hermes"), "none")
        self._write_settings(model_folder)
        self._process = self._start()
        for name, path in lora_modules(arguments):
            folder = make_adapter(Path(f"{path}-taught"), taught()) if is_taught else path
            named = {"lora_name": name, "lora_path": str(folder)}
            answer = requests.post(self.url_for("v1/load_lora_adapter"), json=named, timeout=60)
            answer.raise_for_status()

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return f"{self.url_root}/{'/'.join(parts)}"

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "base_url": self.url_for("v1"),
            "api_key": self.keys[self.port],
            "max_retries": 0,
            "timeout": 600,
        } | options

    def _write_settings(self, model: Path) -> None:
        self.config = self._folder / "loramux.toml"
        self.config.write_text(
            f'[model]\npath = "{model}"\nserved_model_name = "{self.model}"\ntool_parser = "{self._parser}"\n'
            "[engine]\npool_bytes = 134_217_728\nmax_num_batched_tokens = 256\nnum_threads = 1\nin_process = true\n"
            f'[server]\nroot_path = "{self.root_path}"\n[validation]\nparity = false\n[adapters]\nlocal_root = "/"\n'
        )

    def _start(self) -> subprocess.Popen[bytes]:
        from loramux.accounts.tenants.authority import TENANT_SCOPES
        from loramux.common.settings.file import load_settings
        from loramux.server.platform import open_tenants

        async def make_key() -> str:
            async with open_tenants(load_settings(self.config)) as tenants:
                await tenants.create(TENANT)
                return (await tenants.create_key(TENANT, scopes=[*TENANT_SCOPES, "operator"]))[1]

        with ThreadPoolExecutor(1) as thread:  # some tests start a server within an event loop
            self.keys[self.port] = thread.submit(asyncio.run, make_key()).result()
        if self.given_key:
            GIVEN_KEYS[self.port] = self.given_key
        command = [sys.executable, "-m", "loramux_api", "serve", "--config", str(self.config), "--port", str(self.port)]
        log = (self._folder / "server.log").open("wb")
        process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        assert process.stdout.readline(), (self._folder / "server.log").read_text()
        return process


def base() -> Path:
    tests = next(FOLDER.glob("vllm-*/tests"))
    texts = [path.read_text() for path in sorted(tests.rglob("test_*.py"))[:400]]
    return make_base(BASE, texts)


def taught() -> Path:
    tests = next(FOLDER.glob("vllm-*/tests"))
    return TAUGHT if (TAUGHT / "config.json").exists() else make_taught(TAUGHT, base(), list(lessons(tests)))


def current_file() -> str:
    """Return the file of the test that runs."""
    return os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]


def value_of(arguments: list[str], option: str, default: str) -> str:
    """Return the value of an option; if the option is given twice, its last value."""
    places = [place for place, argument in enumerate(arguments) if argument == option]
    return arguments[places[-1] + 1] if places else default


def lora_modules(arguments: list[str]) -> list[tuple[str, str]]:
    """Return the adapters of `--lora-modules`: name=path, or JSON."""
    if "--lora-modules" not in arguments:
        return []
    first = arguments.index("--lora-modules") + 1
    found = []
    for argument in arguments[first:]:
        if argument.startswith("--"):
            break
        given = json.loads(argument) if argument.startswith("{") else None
        found.append((given["name"], given["path"]) if given else tuple(argument.split("=", 1)))
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- vLLM's modules


def _snapshot(repo_id: str, **_: Any) -> str:
    return str(make_adapter(ADAPTERS / repo_id.replace("/", "-"), base()))


def _get_tokenizer(*_: Any, **__: Any) -> Any:
    return AutoTokenizer.from_pretrained(base())


def _model_config(*_: Any, **__: Any) -> Any:
    return SimpleNamespace(get_vocab_size=lambda: len(_get_tokenizer()))


KNOWN = {
    "vllm.tokenizers": {"get_tokenizer": _get_tokenizer},
    "vllm.config": {"ModelConfig": _model_config},
    "vllm.version": {"__version__": version("loramux")},
    "vllm": {"envs": SimpleNamespace(VLLM_USE_RUST_FRONTEND=False)},
    "vllm.transformers_utils.repo_utils": {"hf_api": lambda: SimpleNamespace(snapshot_download=_snapshot)},
    "vllm.model_executor.model_loader.weight_utils": {"download_weights_from_hf": lambda *_, **__: str(base())},
    "vllm.platforms": {"current_platform": SimpleNamespace(is_rocm=lambda: False)},
    "tests.utils": {
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "ROCM_EXTRA_ARGS": [],
        "VLLM_PATH": next(FOLDER.glob("vllm-*/tests")).parent,
    },
}


STOOD_IN = ("vllm", "fastapi", "pybase64")
"""Packages from which tests import names that no HTTP test uses."""


class StandIn(types.ModuleType):
    """A module in which every name exists: a value of KNOWN, or an empty class."""

    def __getattr__(self, name: str) -> Any:
        known = KNOWN.get(self.__name__, {})
        if name in known:
            return known[name]
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a StandIn for every module of vLLM's, and for its tests' utilities."""

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.partition(".")[0] in STOOD_IN or name == "tests.utils":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())


GIVEN_KEYS: dict[int, str] = {}
"""API key that a test gave to its server, by port."""


def authorization(url: str, given: str | None) -> str:
    """Return the header with this server's key: for a request that has no key, or the key that the test chose."""
    port = urlsplit(url).port or 0
    key = RemoteOpenAIServer.keys.get(port, "")
    is_chosen = given is not None and port in GIVEN_KEYS and given == f"Bearer {GIVEN_KEYS[port]}"
    return f"Bearer {key}" if given is None or is_chosen else given


def _send_key() -> None:
    """Make `requests` and the openai client send the right key, because vLLM's tests send no key or their own key."""
    plain = requests.Session.request

    def request(self: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
        headers = dict(options.get("headers") or {})
        headers["Authorization"] = authorization(url, headers.get("Authorization"))
        return plain(self, method, url, **options | {"headers": headers})

    requests.Session.request = request  # type: ignore[method-assign]
    for client in (httpx.AsyncClient, openai.DefaultAsyncHttpxClient):
        _send_key_of(client)


def _send_key_of(client: Any) -> None:
    plain = client.build_request

    def build(self: Any, method: str, url: Any, **options: Any) -> Any:
        built = plain(self, method, url, **options)
        built.headers["Authorization"] = authorization(str(built.url), built.headers.get("Authorization"))
        return built

    client.build_request = build


_send_key()

# ---- selection of tests, and their outcomes


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of vLLM's own classes: because they send no request."""
    kept = [one for one in items if HTTP_FIXTURES & set(one.fixturenames) or one.originalname in HTTP_TESTS]  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=[one for one in items if one not in kept])
    items[:] = kept


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    with_lessons = [case for case in outcomes if case.partition("::")[0] in files_with_lessons]
    Path(os.environ["VLLM_TESTS_REPORT"]).write_text(
        json.dumps({"outcomes": outcomes, "with_lessons": with_lessons}, indent=1)
    )

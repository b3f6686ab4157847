"""Published clients, each in a separate environment, against a running server with trained adapters.

Every check installs its client from the registry (`uv` makes that seconds; without it, pip), runs a script of
`real_clients` that ends with "ok", and keeps nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from client_environments import PATIENCE, RegistryError, make_environment, shell
from running_server import free_port

from loramux_demo.assets import LOOKUP, base_folder
from loramux_demo.server import Workspace, create_customers, running_server
from loramux_demo.tour import Customer

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "real_clients"
VLLM = "0.33.0"

Run = Callable[..., str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of scripts: the address of a server with the demo's adapters, and its tenants' keys."""
    workspace = Workspace(tmp_path_factory.mktemp("served"), free_port())
    workspace.prepare()
    keys = create_customers(workspace)
    with running_server(workspace) as server:
        server.wait_until_ready()
        for tenant, key in keys.items():
            Customer(tenant, workspace.url, key).upload_adapters()
        facts = {"URL": workspace.url, "LOOKUP": json.dumps(LOOKUP), "TOKENIZER": str(base_folder())}
        yield facts | {tenant.upper(): key for tenant, key in keys.items()}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Make a virtual environment with some packages, and return the folder of its programs."""
    made: list[Path] = []

    def make(*packages: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        made.append(folder)
        try:
            return make_environment(folder, *packages)
        except RegistryError as error:
            pytest.skip(f"{' '.join(packages)} cannot be installed here: {error}")

    yield make
    for folder in made:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ask(served: dict[str, str]) -> Run:
    """Run a program with the server's address and keys in its environment; returns what it prints."""

    def run(*command: str, **more: str) -> str:
        facts = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, env=facts | served | more, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("script", "packages"),
    [
        ("use_openai.py", ("openai",)),
        ("use_langchain.py", ("langchain-openai",)),
        ("use_litellm.py", ("litellm[proxy]",)),  # without it litellm imports what it has not
        ("use_anthropic.py", ("anthropic",)),
    ],
)
def test_python_client_works(
    script: str, packages: tuple[str, ...], environment: Callable[..., Path], ask: Run
) -> None:
    assert ask(str(environment(*packages) / "python"), str(SCRIPTS / script)).endswith("ok\n")


def test_litellm_proxy_works(
    served: dict[str, str], environment: Callable[..., Path], ask: Run, tmp_path: Path
) -> None:
    programs, port = environment("litellm[proxy]"), free_port()
    models = [("globex/pirate", served["GLOBEX"]), ("globex/agent", served["GLOBEX"]), ("globex/wrong-key", "sk-wrong")]
    config = {
        "model_list": [
            {
                "model_name": name,
                "litellm_params": {
                    "model": f"openai/{name.replace('wrong-key', 'pirate')}",
                    "api_base": f"{served['URL']}/v1",
                    "api_key": key,
                },
            }
            for name, key in models
        ],
        "litellm_settings": {"num_retries": 0},
        "general_settings": {"master_key": "sk-proxy"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [str(programs / "litellm"), "--config", str(tmp_path / "config.yaml"), "--port", str(port)]
    with (tmp_path / "proxy.log").open("w") as log:
        proxy = subprocess.Popen([*command, "--host", "127.0.0.1"], stdout=log, stderr=log, cwd=tmp_path)
    try:
        wait_until(f"http://127.0.0.1:{port}/health/liveliness", proxy, tmp_path / "proxy.log")
        said = ask(str(programs / "python"), str(SCRIPTS / "use_litellm.py"), PROXY=f"http://127.0.0.1:{port}/v1")
        assert said.endswith("ok\n")
    finally:
        proxy.kill()
        proxy.wait()


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


def test_lm_eval_ranks_choices_by_their_log_probabilities(
    served: dict[str, str], environment: Callable[..., Path], ask: Run, tmp_path: Path
) -> None:
    questions = json.loads((base_folder().parent / "questions.json").read_text())
    mine = [one for one in questions if one["adapter"] == "terse"]
    answers = [one["expected"] for one in mine]
    rows = [
        {"question": one["question"], "choices": [right, *[other for other in answers if other != right][:3]]}
        for one, right in zip(mine, answers, strict=True)
    ]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "facts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "facts.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": 0,
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "facts.yaml").write_text(json.dumps(task))
    programs = environment("lm-eval[api]")
    ask(
        str(programs / "lm_eval"), "--model", "local-completions", "--tasks", "facts", "--include_path", str(tmp_path),
        "--model_args",
        f"base_url={served['URL']}/v1/completions,model=acme/terse,tokenizer_backend=remote,"
        f"auth_token={served['ACME']},num_concurrent=4,max_length=512",
        "--output_path", str(tmp_path / "out"),
        OPENAI_API_KEY=served["ACME"], HF_HOME=str(tmp_path / "hf"),
    )  # fmt: skip
    report = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    assert report["results"]["facts"]["acc,none"] == 1.0, report["results"]


def test_guidellm_measures_every_request(
    served: dict[str, str], environment: Callable[..., Path], ask: Run, tmp_path: Path
) -> None:
    rows = [{"prompt": "Q: What does Halkodel do?\nA: " + "x" * n, "output_tokens_count": 8} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    programs = environment("guidellm", "transformers")
    ask(
        str(programs / "guidellm"), "run", "--profile", "kind=synchronous",
        "--backend", f"kind=openai_http,target={served['URL']},model=globex/pirate,api_key={served['GLOBEX']}",
        "--constraint", "kind=max_requests,count=5", "--data", f"kind=json_file,path={tmp_path / 'prompts.jsonl'}",
        "--tokenizer", f"kind=huggingface_auto,model={served['TOKENIZER']}",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console",
    )  # fmt: skip
    totals = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (5, 0), totals


def test_vllm_benchmark_client_counts_tokens(
    environment: Callable[..., Path], ask: Run, tmp_path: Path, served: dict[str, str]
) -> None:
    programs = environment("aiohttp", "regex", "tqdm")
    pip = (sys.executable, "-m", "pip")  # vLLM's metadata is made by its setup.py, which imports torch
    needed = ("setuptools", "setuptools_scm", "setuptools_rust", "packaging", "semantic_version", "vcs_versioning")
    where = ("--no-deps", "--no-binary", "vllm", "--no-build-isolation", "--dest", str(tmp_path))
    flags = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VLLM, "PYTHONPATH": str(tmp_path / "packages")}
    try:
        shell(*pip, "install", "--quiet", "--no-deps", "--target", str(tmp_path / "packages"), *needed)
        shell(*pip, "download", "--quiet", *where, f"vllm=={VLLM}", **flags)
    except RegistryError as error:
        pytest.skip(f"vLLM's source distribution cannot be fetched here: {error}")
    with tarfile.open(next(tmp_path.glob("vllm-*.tar.gz"))) as archive:
        member = f"vllm-{VLLM}/vllm/benchmarks/lib/endpoint_request_func.py"
        archive.extract(member, tmp_path, filter="data")
    said = ask(str(programs / "python"), str(SCRIPTS / "use_vllm_bench.py"), CLIENT=str(tmp_path / member))
    assert said.endswith("ok\n")


@pytest.mark.parametrize(
    ("script", "packages"),
    [("use_openai.mjs", ("openai",)), ("use_ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible", "zod"))],
)
def test_npm_client_works(script: str, packages: tuple[str, ...], ask: Run, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    try:
        shell("npm", "install", "--no-fund", "--no-audit", "--prefix", str(tmp_path), *packages)
    except RegistryError as error:
        pytest.skip(f"npm cannot install {packages}: {error}")
    shutil.copy(SCRIPTS / script, tmp_path)
    assert ask("node", str(tmp_path / script)).endswith("ok\n")

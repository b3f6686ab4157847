"""TRL's own client and its AsyncGRPO loop, unchanged, push adapters to this server and train on its answers.

pytest tests/e2e/test_trl_loop.py -m slow -s      # prints the times of the updates, staleness and rewards
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import trl_loop
from safetensors.torch import load_file, save_file
from server_process import Child, Place, served
from tiny_base import make_base

STEPS = 50
HEAD = 20.0
LEARNED = 0.2
"""The least rise of the mean reward: the share of low bytes, a half for the untrained model."""
INSTALL_SECONDS, RUN_SECONDS = 600, 450
STANDINS = {
    "vllm/__init__.py": "__version__ = '0.27.0'\nLLM = RequestOutput = SamplingParams = None\n",
    "vllm/sampling_params.py": "StructuredOutputsParams = None\n",
    "vllm/utils/__init__.py": "",
    "vllm/utils/network_utils.py": "get_ip = get_open_port = None\n",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/nccl_engine.py": "NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine = None\n",
    "vllm-0.27.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.27.0\n",
}
"""The names that TRL imports of vLLM: it uses none of them without NCCL."""
CLIENT = """
import json, sys
from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1])
client.model = "trl-policy"
found = client.generate([[104, 105], [97]], n=2, temperature=1.0, max_tokens=6, logprobs=2)
scored = client.get_sequence_logprobs([found["prompt_ids"][0] + found["completion_ids"][0]], [2], top_logprobs=3)
client.reset_prefix_cache()
try:
    client.init_communicator(device="cpu")
except RuntimeError as error:
    refused = str(error)
json.dump({"found": found, "scored": scored, "size": client.get_world_size(), "refused": refused}, sys.stdout)
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A Python with TRL, aiohttp and the stand-ins for vLLM."""
    pytest.importorskip("trl")
    assert tuple(map(int, version("trl").split(".")[:2])) >= (1, 16)
    standins, packages = tmp_path_factory.mktemp("standins"), tmp_path_factory.mktemp("aiohttp")
    for name, text in STANDINS.items():
        (standins / name).parent.mkdir(parents=True, exist_ok=True)
        (standins / name).write_text(text)
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), "aiohttp"]
    subprocess.run(command, check=True, timeout=INSTALL_SECONDS)
    paths = f"{standins}:{packages}"
    return os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random base whose adapters can learn: no LoRA moves the small logits of a random head by enough."""
    folder = make_base(tmp_path_factory.mktemp("base"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= HEAD
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def place(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("place"), base_dir).prepare()
    (place.folder / "pushes" / "lab").mkdir(parents=True)
    place.config.write_text(place.config.read_text() + '[pushes]\nroot = "pushes"\n')
    return place


@pytest.fixture(scope="module")
def address(place: Place) -> Iterator[tuple[Child, str]]:
    """A server, and its address for a trainer of the tenant `lab`: TRL has no setting for a key."""
    place.loramux("tenant", "create", "lab")
    scopes = ("--scope", "push", "--scope", "inference")
    key = place.loramux("key", "create", "--tenant", "lab", *scopes)["key"]
    with served(place) as server:
        yield server, server.url.replace("//", f"//trainer:{key}@")


def run(environment: dict[str, str], *command: str) -> str:
    ran = subprocess.run(
        [sys.executable, *command], check=False, capture_output=True, text=True, timeout=RUN_SECONDS, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def test_async_grpo_trains_for_fifty_steps(
    place: Place, base_dir: Path, address: tuple[Child, str], environment: dict[str, str]
) -> None:
    folder = place.folder / "pushes" / "lab" / "run"
    run(environment, trl_loop.__file__, str(base_dir), address[1], str(folder), str(STEPS))
    result = json.loads((folder / "result.json").read_text())
    assert result["version"] == STEPS + 1
    loads = sorted(result["load_seconds"])
    print(f"update: median {statistics.median(loads) * 1000:.0f} ms, p99 {loads[int(0.99 * len(loads))] * 1000:.0f} ms")
    log = [one for one in result["log"] if "reward" in one]
    assert len(log) == STEPS
    assert abs(float(log[0]["kl"])) < 1e-4, "the server's log probabilities are those of the trainer's own forward"
    stale = max(float(one["sample/staleness_max"]) for one in log)
    print(f"versions between an answer and the policy that it trains: {stale:.0f} at most")
    assert stale <= trl_loop.MAX_STALENESS
    tenth = STEPS // 10
    first, last = (statistics.mean(float(one["reward"]) for one in part) for part in (log[:tenth], log[-tenth:]))
    print(f"reward: {first:.3f} in the first {tenth} steps, {last:.3f} in the last {tenth}")
    assert last > first + LEARNED, "the policy has learned from the answers of the versions that were pushed"
    key = address[1].partition("trainer:")[2].partition("@")[0]
    with address[0].http(key) as http:
        live = {one["id"] for one in http.get("/v1/training_adapters").json()["data"]}
    assert f"lab/trl-policy-v{STEPS + 1}@1" in live
    assert len(live) <= 8


def test_trls_client_generates_scores_and_names_what_is_missing(
    place: Place, base_dir: Path, address: tuple[Child, str], environment: dict[str, str]
) -> None:
    from peft_uploads import CONFIG, WEIGHTS, make_adapter

    adapter = make_adapter(base_dir, place.folder / "adapter", seed=3)
    key = address[1].partition("trainer:")[2].partition("@")[0]
    files = {name: (name, (adapter / name).read_bytes()) for name in (CONFIG, WEIGHTS)}
    with address[0].http(key) as http:
        http.post("/v1/load_lora_adapter", data={"lora_name": "trl-policy"}, files=files).raise_for_status()
    said = json.loads(run(environment, "-c", CLIENT, address[1]))
    found = said["found"]
    assert found["prompt_ids"] == [[104, 105], [97]]
    assert [len(one) for one in found["completion_ids"]] == [len(one) for one in found["logprobs"]]
    chosen = dict(zip(found["logprob_token_ids"][0][0], found["logprobs"][0][0], strict=True))
    again = said["scored"]["actual_logprobs"][0][0][0]
    assert chosen[found["completion_ids"][0][0]] == pytest.approx(again, abs=1e-5)
    assert said["size"] == 1
    assert "no weight-transfer engine" in said["refused"]

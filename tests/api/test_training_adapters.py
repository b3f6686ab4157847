"""Training adapters: pushes from a form, a folder and shared memory, their window of versions, and hostile ones."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa
import torch
from peft_uploads import CONFIG, WEIGHTS, altered, make_adapter
from safetensors.torch import load_file, save
from site_fixture import Site

from loramux.data.records.database import parse_url
from loramux.money.billing.reconcile import reconcile

KEEP = 3
TABLES = ("adapter_events", "audit_entries", "revisions", "adapters", "alias_versions", "uploads")
TRAINER = ("inference", "push", "usage")


@pytest.fixture(scope="session")
def adapter(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(base_dir, tmp_path_factory.mktemp("pushed"), seed=5)


@pytest.fixture
def trainer(site: Site) -> str:
    """A tenant that no other test knows, with a trainer's key."""
    return site.enrol(TRAINER)


def weights(adapter: Path, version: int) -> bytes:
    """The adapter's weights with one value changed to a number that is the version's."""
    tensors = load_file(adapter / WEIGHTS)
    next(iter(tensors.values())).view(-1)[0] = float(version)
    return save(tensors, metadata={"format": "pt"})


def push(site: Site, tenant: str, name: str, data: bytes, config: bytes | None = None, **fields: str) -> httpx.Response:
    config = config or (CONFIGS[0].read_bytes())
    files = {CONFIG: (CONFIG, config), WEIGHTS: (WEIGHTS, data)}
    with site.http(tenant) as http:
        return http.post("/v1/load_lora_adapter", data={"lora_name": name, **fields}, files=files)


CONFIGS: list[Path] = []


@pytest.fixture(autouse=True, scope="session")
def config(adapter: Path) -> None:
    CONFIGS[:] = [adapter / CONFIG]


def load(site: Site, tenant: str, name: str, path: str, **fields: Any) -> httpx.Response:
    with site.http(tenant) as http:
        return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **fields})


def unload(site: Site, tenant: str, name: str) -> httpx.Response:
    with site.http(tenant) as http:
        return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def answered_by(site: Site, tenant: str, model: str) -> str:
    return site.openai(tenant).completions.create(model=model, prompt="x").model


def models(site: Site, tenant: str) -> set[str]:
    with site.http(tenant) as http:
        return {one["id"] for one in http.get("/v1/models").json()["data"]} - {"tiny"}


def versions(site: Site, tenant: str) -> list[dict[str, Any]]:
    with site.http(tenant) as http:
        data: list[dict[str, Any]] = http.get("/v1/training_adapters").json()["data"]
        return data


def maintain(site: Site) -> None:
    platform = site.server.app.state.platform
    asyncio.run_coroutine_threadsafe(platform.adapters.run_maintenance(), site.server.loop).result(60)


def count(site: Site, table: str) -> int:
    engine = sa.create_engine(parse_url(site.settings.records.url), poolclass=sa.NullPool)
    with engine.connect() as connection:
        return int(connection.execute(sa.text(f"SELECT count(*) FROM {table}")).scalar_one())


def test_pushed_version_answers_and_each_answer_names_it(site: Site, trainer: str, adapter: Path) -> None:
    first = push(site, trainer, "policy", weights(adapter, 1))
    assert (first.status_code, first.text) == (200, "Success: LoRA adapter 'policy' added successfully.")
    assert first.headers["x-loramux-version"] == f"{trainer}/policy@1"
    second = push(site, trainer, "policy", weights(adapter, 2), load_inplace="true")
    assert second.headers["x-loramux-version"] == f"{trainer}/policy@2"
    assert answered_by(site, trainer, "policy") == f"{trainer}/policy@2"
    assert answered_by(site, trainer, "policy@1") == f"{trainer}/policy@1", "versions are served side by side"
    digests = [request.adapter.digest for request in site.engine.requests if request.adapter]
    assert len(set(digests)) == 2
    chunks = site.openai(trainer).completions.create(model="policy", prompt="abc", stream=True)
    assert {chunk.model for chunk in chunks} == {f"{trainer}/policy@2"}
    assert models(site, trainer) == {f"{trainer}/policy", f"{trainer}/policy@1"}
    with site.http(trainer) as http:
        assert http.get("/v1/models/policy").json()["root"] == f"{trainer}/policy@2"
        assert http.get(f"/v1/models/{trainer}/policy@1").json()["parent"] == "tiny"
        assert http.get("/v1/adapters").json()["data"] == [], "no list of adapters shows it"


def test_load_without_replacement_is_refused_as_in_vllm_but_may_be_repeated(
    site: Site, trainer: str, adapter: Path
) -> None:
    assert push(site, trainer, "policy", weights(adapter, 1)).status_code == 200
    again = push(site, trainer, "policy", weights(adapter, 1))
    assert (again.status_code, again.headers["x-loramux-version"]) == (200, f"{trainer}/policy@1"), "a retry"
    refused = push(site, trainer, "policy", weights(adapter, 2))
    assert refused.status_code == 400
    assert "load_inplace" in refused.json()["error"]["message"]
    assert answered_by(site, trainer, "policy") == f"{trainer}/policy@1"


def test_older_versions_are_removed_with_rows_files_and_engine(site: Site, trainer: str, adapter: Path) -> None:
    before, seen = {table: count(site, table) for table in TABLES}, set[str]()
    for number in range(1, 8):  # weights of no other test: tenants share stored contents
        push(site, trainer, "policy", weights(adapter, 100 + number), load_inplace="true").raise_for_status()
        seen |= {one["digest"] for one in versions(site, trainer)}
    left = versions(site, trainer)
    assert [one["id"] for one in left] == [f"{trainer}/policy@{number}" for number in (7, 6, 5)]
    with pytest.raises(openai.NotFoundError):
        answered_by(site, trainer, "policy@4")
    removed = seen - {one["digest"] for one in left}
    assert len(removed) == 4
    assert removed <= {key.partition("/")[0] for key in site.engine.retired}
    maintain(site)
    blobs = site.server.app.state.platform.blobs
    stored = set(blobs.digests())
    assert {one["digest"] for one in left} <= stored
    assert not removed & stored
    assert not removed & {one.digest for one in blobs.cached()}
    assert {table: count(site, table) for table in before} == before


def test_names_with_numbers_are_a_series_with_a_window(site: Site, trainer: str, adapter: Path) -> None:
    """TRL, AReaL and others push each version under a new name."""
    for number in range(6):
        push(site, trainer, f"policy-v{number}", weights(adapter, number)).raise_for_status()
    assert models(site, trainer) == {f"{trainer}/policy-v{number}" for number in (3, 4, 5)}
    assert {one["series"] for one in versions(site, trainer)} == {"policy"}
    assert answered_by(site, trainer, "policy-v4") == f"{trainer}/policy-v4@1"
    assert unload(site, trainer, "policy-v4").text == "Success: LoRA adapter 'policy-v4' removed successfully."
    assert unload(site, trainer, "policy-v4").status_code == 404
    with pytest.raises(openai.NotFoundError):
        answered_by(site, trainer, "policy-v4")


def test_the_bill_and_the_engines_counts_have_one_line_a_series(site: Site, trainer: str, adapter: Path) -> None:
    before = count(site, "engine_counts")
    for number in range(4):
        push(site, trainer, f"policy-v{number}", weights(adapter, number)).raise_for_status()
        answered_by(site, trainer, f"policy-v{number}")
    query = {"start_time": int(time.time()) - 3600, "group_by": "model"}
    with site.http(trainer) as http:
        page = http.get("/v1/organization/usage/completions", params=query).json()
    lines = [(one["model"], one["num_model_requests"]) for bucket in page["data"] for one in bucket["results"]]
    assert lines == [(f"{trainer}/policy", 4)]
    assert count(site, "engine_counts") == before + 1
    database = site.server.app.state.platform.database
    found = asyncio.run_coroutine_threadsafe(reconcile(database), site.server.loop).result(60)
    (series,) = [one for one in found.weights if one.adapter_digest == f"{trainer}/policy"]
    assert (series.drift, series.engine) == (0, series.ledger)
    assert series.engine.output > 0


def test_request_keeps_its_version_while_newer_ones_replace_it(site: Site, trainer: str, adapter: Path) -> None:
    push(site, trainer, "policy", weights(adapter, 200)).raise_for_status()
    site.engine.pause = 0.05
    chunks = iter(site.openai(trainer).completions.create(model="policy", prompt="abcdefghijkl" * 3, stream=True))
    assert next(chunks).model == f"{trainer}/policy@1"
    digest = site.engine.requests[-1].adapter
    assert digest is not None
    for number in range(1, 6):
        push(site, trainer, "policy", weights(adapter, number), load_inplace="true").raise_for_status()
    maintain(site)
    stored = site.server.app.state.platform.blobs.digests()
    assert digest.digest.partition("/")[0] in stored, "the files stay as long as a request uses them"
    assert {chunk.model for chunk in chunks} == {f"{trainer}/policy@1"}
    site.engine.pause = 0.0
    maintain(site)
    assert digest.digest.partition("/")[0] not in site.server.app.state.platform.blobs.digests()


@pytest.fixture
def own(site: Site, trainer: str, adapter: Path) -> Iterator[Path]:
    """The tenant's folder below `pushes.root`, with an adapter in `run`."""
    own = Path(str(site.settings.pushes.root), trainer)
    shutil.copytree(adapter, own / "run")
    yield own
    shutil.rmtree(own)


def test_folder_is_pushed_as_vllm_loads_it(site: Site, trainer: str, own: Path) -> None:
    loaded = load(site, trainer, "policy", str(own / "run"), is_3d_lora_weight=True, base_model_name="org/other")
    assert loaded.headers["x-loramux-version"] == f"{trainer}/policy@1"
    assert load(site, trainer, "other", "run", base_model_name="tiny").status_code == 200
    shutil.rmtree(own / "run")
    assert answered_by(site, trainer, "policy") == f"{trainer}/policy@1", "the files were copied"
    own.joinpath("run").mkdir()


def test_folders_of_others_and_links_lead_nowhere(site: Site, trainer: str, own: Path, adapter: Path) -> None:
    other = Path(str(site.settings.pushes.root), "somebody")
    shutil.copytree(adapter, other / "run", dirs_exist_ok=True)
    (own / "link").symlink_to(other / "run", target_is_directory=True)
    (own / "half").mkdir()
    (own / "half" / WEIGHTS).symlink_to(other / "run" / WEIGHTS)
    shutil.copy(adapter / CONFIG, own / "half")
    (own / "pipe").mkdir()
    shutil.copy(adapter / CONFIG, own / "pipe")
    os.mkfifo(own / "pipe" / WEIGHTS)
    for path in (str(other / "run"), "../somebody/run", "link", "half", "pipe", "absent", "/etc", "run/../../x"):
        refused = load(site, trainer, "policy", path)
        assert refused.status_code == 404, path
        assert refused.json()["error"]["param"] == "lora_path"
    assert load(site, trainer, "policy", "a\0b").status_code == 400
    assert versions(site, trainer) == []


@pytest.fixture
def segment(site: Site, trainer: str, adapter: Path) -> Iterator[Callable[..., str]]:
    made: list[SharedMemory] = []

    def make(name: str, mode: int = 0o600) -> str:
        data = (adapter / WEIGHTS).read_bytes()
        one = SharedMemory(name, create=True, size=len(data))
        one.buf[: len(data)] = data
        os.chmod(f"/dev/shm/{name}", mode)
        made.append(one)
        return f"shm:{name}"

    yield make
    for one in made:
        one.close()
        one.unlink()


def test_segment_of_shared_memory_is_pushed(
    site: Site, trainer: str, segment: Callable[..., str], adapter: Path
) -> None:
    place, config = segment(f"{trainer}:policy"), json.loads((adapter / CONFIG).read_bytes())
    loaded = load(site, trainer, "policy", place, adapter_config=config)
    assert loaded.headers["x-loramux-version"] == f"{trainer}/policy@1"
    assert answered_by(site, trainer, "policy") == f"{trainer}/policy@1"


def test_segments_of_others_are_not_read(site: Site, trainer: str, segment: Callable[..., str], adapter: Path) -> None:
    config = json.loads((adapter / CONFIG).read_bytes())
    for place, status in (
        (segment("somebody:policy"), 400),
        (segment(f"{trainer}-policy"), 400),
        (segment(f"{trainer}:open", 0o622), 404),
        (f"shm:{trainer}:absent", 404),
        (f"shm:{trainer}:../x", 400),
        (f"shm:../{trainer}:x", 400),
    ):
        assert load(site, trainer, "policy", place, adapter_config=config).status_code == status, place
    os.symlink("/dev/shm/somebody:policy", f"/dev/shm/{trainer}:link")
    try:
        assert load(site, trainer, "policy", f"shm:{trainer}:link", adapter_config=config).status_code == 404
    finally:
        os.unlink(f"/dev/shm/{trainer}:link")
    missing = load(site, trainer, "policy", segment(f"{trainer}:bare"))
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "adapter_config")
    assert versions(site, trainer) == []


def not_finite(value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: next(iter(tensors.values())).view(-1).__setitem__(3, value)


def narrower(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name][:, :-1].contiguous()


def with_stranger(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 8)


def lying(data: bytes) -> bytes:
    """A header whose last tensor ends beyond the file."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    last = max((one for one in header.values() if "data_offsets" in one), key=lambda one: one["data_offsets"][1])
    last["data_offsets"][1] += 1 << 40
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data[8 + size :]


@pytest.mark.parametrize(
    "hostile",
    [
        lambda adapter: altered(adapter, not_finite(float("nan"))),
        lambda adapter: altered(adapter, not_finite(float("inf"))),
        lambda adapter: altered(adapter, narrower),
        lambda adapter: altered(adapter, with_stranger),
        lambda adapter: lying((adapter / WEIGHTS).read_bytes()),
        lambda adapter: (adapter / WEIGHTS).read_bytes()[:-7],
        lambda _: b"\xff" * 64,
        lambda _: b"x",
    ],
    ids=["NaN", "infinity", "narrower", "stranger", "offsets", "cut", "header", "byte"],
)
def test_hostile_weights_change_nothing(
    site: Site, trainer: str, adapter: Path, tmp_path: Path, hostile: Callable[[Path], bytes]
) -> None:
    copy = shutil.copytree(adapter, tmp_path / "copy")
    push(site, trainer, "policy", weights(adapter, 1)).raise_for_status()
    refused = push(site, trainer, "policy", hostile(copy), load_inplace="true")
    assert refused.status_code == 400, refused.text
    assert [one["id"] for one in versions(site, trainer)] == [f"{trainer}/policy@1"]
    assert answered_by(site, trainer, "policy") == f"{trainer}/policy@1"


@pytest.mark.parametrize("config", [b"{}", b"[", b'{"peft_type": "LORA", "r": -3, "target_modules": ["q_proj"]}'])
def test_hostile_configuration_is_refused(site: Site, trainer: str, adapter: Path, config: bytes) -> None:
    refused = push(site, trainer, "policy", weights(adapter, 1), config)
    assert refused.status_code == 400
    assert versions(site, trainer) == []


@pytest.mark.parametrize("name", ["globex/policy", "acme/left-over", "No Name", "tiny/x", "", "a/b/c", "x" * 65])
def test_names_that_are_not_the_tenants_are_refused(site: Site, trainer: str, adapter: Path, name: str) -> None:
    assert push(site, trainer, name, weights(adapter, 1)).status_code == 400
    assert load(site, trainer, name, "run").status_code == 400
    if name:
        assert unload(site, trainer, name).status_code == 404


def test_other_tenants_neither_call_nor_see_nor_remove_it(site: Site, trainer: str, adapter: Path) -> None:
    push(site, trainer, "policy", weights(adapter, 1)).raise_for_status()
    other = site.enrol((*TRAINER, "adapters"))
    for name in ("policy", f"{trainer}/policy", f"{trainer}/policy@1"):
        with pytest.raises(openai.NotFoundError):
            answered_by(site, other, name)
        assert unload(site, other, name).status_code == 404
    assert models(site, other) == set()
    assert versions(site, other) == []
    with site.http(other) as http:
        assert http.get(f"/v1/models/{trainer}/policy").status_code == 404
    assert answered_by(site, trainer, "policy") == f"{trainer}/policy@1"


def test_trainers_key_pushes_and_does_nothing_else(site: Site, trainer: str, adapter: Path) -> None:
    push(site, trainer, "policy", weights(adapter, 1)).raise_for_status()
    with site.http(trainer) as http:
        assert http.delete("/v1/adapters/policy").status_code == 403
        assert http.post("/v1/keys", json={}).status_code == 403
        assert http.get("/load").status_code == 403
    without = site.enrol()
    refused = push(site, without, "policy", weights(adapter, 1))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")
    assert load(site, without, "policy", "run").status_code == 403
    assert unload(site, without, "policy").status_code == 403
    operator = push(site, "no-scopes", "policy", weights(adapter, 1))
    assert (operator.status_code, "'push'" in operator.text) == (403, True)


def test_name_of_an_uploaded_adapter_and_of_a_training_adapter_exclude_each_other(site: Site, adapter: Path) -> None:
    tenant = site.enrol((*TRAINER, "adapters"))
    files = {name: (name, (adapter / name).read_bytes()) for name in (CONFIG, WEIGHTS)}
    with site.http(tenant) as http:
        http.post("/v1/adapters", data={"name": "bot"}, files=files).raise_for_status()
        push(site, tenant, "policy", weights(adapter, 1)).raise_for_status()
        refused = http.post("/v1/adapters", data={"name": "policy"}, files=files)
        assert (refused.status_code, "training adapter" in refused.text) == (400, True)
        assert http.put("/v1/adapters/policy/grants/acme").status_code == 404
    refused = push(site, tenant, "bot", weights(adapter, 1), load_inplace="true")
    assert (refused.status_code, refused.json()["error"]["message"].startswith(f"`{tenant}/bot` is")) == (409, True)
    assert unload(site, tenant, "bot").status_code == 404
    assert answered_by(site, tenant, "bot") == f"{tenant}/bot@1"


def test_tenant_has_a_limited_number_of_series(site: Site, trainer: str, adapter: Path) -> None:
    for name in ("one-v1", "two", "one-v2", "two"):
        push(site, trainer, name, weights(adapter, 1), load_inplace="true").raise_for_status()
    refused = push(site, trainer, "three", weights(adapter, 1))
    assert (refused.status_code, "pushes.series_per_tenant" in refused.text) == (400, True)
    assert unload(site, trainer, "two").status_code == 200
    assert push(site, trainer, "three", weights(adapter, 1)).status_code == 200


def test_versions_count_in_the_tenants_bytes(site: Site, trainer: str, adapter: Path) -> None:
    size = len(weights(adapter, 1)) + (adapter / CONFIG).stat().st_size
    with site.http("all-scopes") as http:
        limit = f"/admin/tenants/{trainer}/limits/adapter_bytes"
        http.put(limit, json={"value": 2 * size + 100}).raise_for_status()
    for number in (1, 2):
        push(site, trainer, "policy", weights(adapter, number), load_inplace="true").raise_for_status()
    refused = push(site, trainer, "policy", weights(adapter, 3), load_inplace="true")
    assert (refused.status_code, "adapter_bytes" in refused.text) == (400, True)
    assert [one["id"] for one in versions(site, trainer)] == [f"{trainer}/policy@2", f"{trainer}/policy@1"]


def test_flood_of_one_tenant_is_refused_and_does_not_delay_another(site: Site, trainer: str, adapter: Path) -> None:
    answers: list[int] = []

    def flood(number: int) -> None:
        answers.append(push(site, trainer, "policy", weights(adapter, number), load_inplace="true").status_code)

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    other = site.enrol(TRAINER)
    assert push(site, other, "policy", weights(adapter, 99)).status_code == 200
    for thread in threads:
        thread.join()
    assert set(answers) == {200, 429}
    assert len(versions(site, trainer)) <= KEEP


def test_series_without_pushes_is_removed(site: Site, trainer: str, adapter: Path) -> None:
    push(site, trainer, "policy", weights(adapter, 1)).raise_for_status()
    engine = sa.create_engine(parse_url(site.settings.records.url), poolclass=sa.NullPool)
    with engine.begin() as connection:
        old = sa.text("UPDATE training_versions SET created_at = created_at - :age WHERE tenant_id = "
                      "(SELECT id FROM tenants WHERE name = :name)")  # fmt: skip
        connection.execute(old, {"age": 25 * 3600 * 10**6, "name": trainer})
    pushes = site.server.app.state.platform.pushes
    asyncio.run_coroutine_threadsafe(pushes.expire(), site.server.loop).result(60)
    assert versions(site, trainer) == []
    assert site.engine.retired


def test_key_is_taken_from_the_address_too(site: Site, trainer: str) -> None:
    """TRL's clients have no setting for a key."""
    key = site.keys[trainer]
    address = site.url.replace("//", f"//trainer:{key}@")
    assert httpx.get(f"{address}/get_world_size").json() == {"world_size": 1}
    wrong = httpx.get(f"{site.url}/get_world_size", auth=("trainer", key + "x"))
    assert wrong.status_code == 401
    assert httpx.get(f"{site.url}/get_world_size", headers={"Authorization": "Basic ###"}).status_code == 401


def test_trainer_finds_its_routes_with_its_own_key(site: Site, trainer: str) -> None:
    with site.http(trainer) as http:
        info = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
        assert info["lora_config"] == {"max_lora_rank": 256, "max_loras": KEEP}
        assert info["model_config"]["dtype"] == "torch.float32"
        assert http.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        assert http.post("/resume").json() == {"status": "resumed"}
        assert http.post("/reset_prefix_cache").json() == {"success": True}


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/skyrl/v1/load_lora_adapter"])
def test_folder_is_pushed_in_place_as_prime_rl_and_skyrl_load_it(
    site: Site, trainer: str, own: Path, adapter: Path, path: str
) -> None:
    """The bodies of prime-rl's `load_lora_adapter` and SkyRL 0.3's `RemoteInferenceClient`: one name, no flag."""
    body = {"lora_name": "policy", "lora_path": (own / "run").as_posix()}
    with site.http(trainer) as http:
        for number in (1, 2):
            (own / "run" / WEIGHTS).write_bytes(weights(adapter, 300 + number))
            loaded = http.post(path, json=body)
            assert loaded.json() == {"lora_name": "policy", "status": "ok"}
            assert loaded.headers["x-loramux-version"] == f"{trainer}/policy@{number}"
        refused = http.post(path, json=body | {"lora_path": str(own / "absent")})
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "NotFoundError")
        assert http.post(path, json={"lora_name": "policy"}).json()["error"]["param"] == "lora_path"
        assert http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "policy"}).status_code == 200
    with site.http("all-scopes") as http:
        assert http.post(path, json=body).status_code == 403, "an operator's adapters are permanent"


def test_areal_pauses_loads_resumes_and_generates_with_token_ids(site: Site, trainer: str, own: Path) -> None:
    """The requests of AReaL 1.0's `VLLMBackend` with a LoRA from the disk."""
    name = "policy-v7"
    asked = {
        **{
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": 4,
            "temperature": 1.0,
            "stop_token_ids": [256],
            "ignore_eos": False,
        },
        **{"skip_special_tokens": True, "return_tokens_as_token_ids": True, "logprobs": 0, "use_beam_search": False},
        **{"ignore_eos": False, "stream": False, "model": name, "prompt": [104, 105]},
    }
    with site.http(trainer) as http:
        assert http.request("GET", "/health", json={}).status_code == 200
        assert http.post("/areal_pause_generation", json={}).json()["success"] is True
        http.post("/v1/load_lora_adapter", json={"lora_path": str(own / "run"), "lora_name": name}).raise_for_status()
        assert http.post("/areal_continue_generation", json={}).json()["success"] is True
        choice = http.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]
    tokens = [int(one.split(":")[1]) for one in choice["logprobs"]["tokens"]]
    assert len(tokens) == len(choice["logprobs"]["token_logprobs"]) > 0


@pytest.mark.parametrize(
    "path",
    [
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/init_broadcaster", "/areal_update_weights", "/areal_init_weights_update_group"),
        *("/areal_update_weights_xccl", "/areal_update_weights_lora_xccl"),
    ],
)
def test_weights_of_the_whole_model_are_refused_by_name(site: Site, trainer: str, path: str) -> None:
    with site.http(trainer) as http:
        refused = http.post(path, json={"init_info": {}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_operation")
    assert path in refused.json()["error"]["message"]
    assert "NCCL" in refused.json()["error"]["message"]

"""Plans: the fewest GPUs that keep the goals, from descriptions and logs; and the two commands."""

from __future__ import annotations

import csv
import json
import tomllib
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from loramux.simulator.description import describe_log, traffic_as_toml
from loramux.simulator.hardware import DEVICES, MODELS
from loramux.simulator.plan_report import alternative_text, reason_of, settings_of
from loramux.simulator.planner import Goals, Plan, Planner
from loramux.simulator.scenario import Client, Constant, LogNormal, ScenarioError, model_of
from loramux.simulator.traffic import LoggedRequest, Traffic, draw_arrivals, read_workload
from loramux_api.cli.main import main

TRAFFIC = """
duration_s = 4
[[clients]]
tenant = "chat"
tenants = 4
adapters = 12
rate = 60
prompt_tokens = { distribution = "lognormal", mu = 5.5, sigma = 0.5, high = 1000 }
output_tokens = { distribution = "uniform", low = 10, high = 60 }
"""


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    path = tmp_path / "traffic.toml"
    path.write_text(TRAFFIC)
    return path


def log_of(traffic: Path, suffix: str) -> Path:
    arrivals, path = read_workload(traffic), traffic.with_suffix(suffix)
    rows = [
        {
            "arrival_s": at,
            "prompt_tokens": len(request.prompt_token_ids),
            "output_tokens": output,
            "tenant": source.tenant,
            "adapter": source.adapter.digest,
        }
        for at, source, output, request in arrivals.requests()
    ]
    with path.open("w", newline="") as file:
        if suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_log_says_the_same_as_the_traffic_it_was_taken_of(traffic: Path, suffix: str) -> None:
    described, logged = read_workload(traffic), read_workload(log_of(traffic, suffix))
    assert logged.prompt_tokens.tolist() == described.prompt_tokens.tolist()
    assert logged.at.tolist() == pytest.approx((described.at - described.at[0]).tolist())
    assert len(logged.adapters) == len(described.adapters)
    tenants = [described.sources[i].tenant for i in described.source]
    assert [logged.sources[i].tenant for i in logged.source] == tenants


def test_as_many_gpus_as_the_goals_need_and_no_more(traffic: Path) -> None:
    heard = []
    planner = Planner(DEVICES["a10g"], MODELS["qwen2.5-0.5b"], read_workload(traffic), Goals(ttft_ms=400, itl_ms=60))
    plan = planner.plan(heard.append)
    assert plan.goals_met
    assert plan.recommended.excess(plan.goals) <= 1
    assert plan.tried == heard
    fewer = [trial for trial in plan.tried if trial.settings.gpus < plan.recommended.settings.gpus]
    assert all(trial.excess(plan.goals) > 1 for trial in fewer)
    same = [t for t in plan.tried if t.settings.gpus == plan.recommended.settings.gpus and t.excess(plan.goals) <= 1]
    assert min(t.excess(plan.goals) + t.preemption_rate for t in same) == pytest.approx(
        plan.recommended.excess(plan.goals) + plan.recommended.preemption_rate
    )


def test_plan_of_several_gpus_is_simulated_whole_with_the_router(traffic: Path) -> None:
    device = DEVICES["a10g"].slowed(3.0)
    plan = Planner(device, MODELS["qwen2.5-0.5b"], read_workload(traffic), Goals(ttft_ms=300, itl_ms=60)).plan()
    assert plan.goals_met
    assert plan.recommended.simulated == plan.recommended.settings.gpus > 1
    routed = [trial for trial in plan.tried if trial.simulated > 1]
    assert plan.recommended == routed[-1]
    assert all(trial.excess(plan.goals) > 1 for trial in routed[:-1])


def test_goals_that_nothing_keeps_are_said_to_be_missed(traffic: Path) -> None:
    arrivals = read_workload(traffic)
    few = arrivals.only(arrivals.at < 0.1)
    plan = Planner(DEVICES["a10g"], MODELS["llama-2-7b"], few, Goals(ttft_ms=1, itl_ms=1)).plan()
    assert not plan.goals_met


def plan_of_prompts(itl_ms: float, *, prompt: int, output: int) -> Plan:
    """A plan of 24 requests in 8 seconds for an 8B on an A10G, whose step of 512 prompt tokens takes 201 ms."""
    lengths = {"prompt_tokens": Constant(prompt), "output_tokens": Constant(output)}
    client = Client(tenant="t", rate=3.0, cv=0, requests=24, **lengths)
    arrivals = draw_arrivals([client], 10.0, 0)
    return Planner(DEVICES["a10g"], MODELS["llama-3.1-8b"], arrivals, Goals(ttft_ms=4000, itl_ms=itl_ms)).plan()


def test_prompts_step_that_misses_the_goal_alone_gets_a_smaller_chunk_and_not_more_gpus() -> None:
    plan = plan_of_prompts(100, prompt=700, output=40)
    assert plan.goals_met
    assert plan.recommended.settings.gpus <= 2
    assert plan.prompt_step.tokens == 512
    assert plan.prompt_step.ms > 100
    chunk = plan.recommended.settings.max_mixed_prefill_tokens
    assert 128 <= chunk <= 192
    assert f"max_mixed_prefill_tokens is {chunk}" in reason_of(plan).text
    assert tomllib.loads(settings_of(plan))["engine"]["max_mixed_prefill_tokens"] == chunk


def test_goal_that_no_chunk_keeps_is_said_to_need_another_gpu() -> None:
    plan = plan_of_prompts(20, prompt=700, output=40)
    assert not plan.goals_met
    assert plan.recommended.settings.gpus <= 2, "the first token needs no more"
    assert plan.prompt_step.tokens == 16
    assert "More GPUs do not help, because the memory's bandwidth binds: only a faster GPU" in reason_of(plan).text


@pytest.mark.parametrize(
    ("itl_ms", "prompt", "output"),
    [
        pytest.param(300, 700, 40, id="steps that keep the goal"),
        pytest.param(100, 700, 500, id="steps too few to move the p99"),
        pytest.param(100, 100, 40, id="prompts shorter than a chunk"),
    ],
)
def test_chunk_that_does_not_miss_the_goal_stays_the_engines_default(itl_ms: float, prompt: int, output: int) -> None:
    plan = plan_of_prompts(itl_ms, prompt=prompt, output=output)
    assert plan.prompt_step is None
    assert plan.recommended.settings.max_mixed_prefill_tokens is None
    assert "max_mixed_prefill_tokens" not in settings_of(plan)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"arrival_s": 0, "prompt_tokens": 3}\n', "request 1.*output_tokens"),
        ("a.jsonl", "{\n", "line 1"),
        ("a.jsonl", "", "no requests"),
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n0,x,3\n", "request 1"),
        ("a.toml", "duration_s = 0\nclients = []", "duration_s"),
        ("a.parquet", "", "jsonl"),
    ],
)
def test_a_workload_that_cannot_be_read_is_refused_by_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ScenarioError, match=words):
        read_workload(path)


def test_a_model_comes_from_its_own_config(tmp_path: Path) -> None:
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32}
    config = llama | {
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    expected = msgspec.structs.replace(MODELS["llama-3.1-8b"], max_model_len=131072)
    assert model_of(str(tmp_path)) == model_of(str(tmp_path / "config.json")) == expected
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    with pytest.raises(ScenarioError, match="num_hidden_layers"):
        model_of(str(tmp_path))


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_simulate_prints_one_json_document(tmp_path: Path) -> None:
    code, out, _ = run("simulate", "fairness-two-clients", "--set", "duration_s=3", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["accepted"] == 5 + 9
    assert set(report["per_tenant"]) == {"modest", "greedy"}
    code, out, _ = run("simulate", "--scenario", "fairness-two-clients", "--set", "duration_s=3")
    assert "service gap" in out
    assert "fairness-flood" in run("simulate")[1]


def test_a_wrong_scenario_is_one_sentence_and_exit_code_1() -> None:
    code, _, error = run("simulate", "fairness-two-clients", "--set", "duration=3")
    assert code == 1
    assert "duration" in error
    assert "Traceback" not in error


def test_plan_of_a_base_that_fits_only_quantized_or_on_ranks(traffic: Path) -> None:
    command = ["plan", "--workload", str(traffic), "--gpu", "h100", "--model", "llama-3.1-70b"]
    code, _, error = run(*command)
    assert code == 1
    assert "weights of 141.1 GB on each of 1 ranks" in error
    assert "--tensor-parallel-size 2 would fit" in error
    command += ["--quantization", "int8", "--tensor-parallel-size"]
    code, out, _ = run(*command, "4")
    assert code == 0
    assert "4 x h100" in out
    assert "weights 18.2 GB, pool 53.8 GB" in out
    assert "on each of an engine's 4 ranks" in out
    assert "Engines of several ranks have not run on GPUs yet" in out
    assert "tensor_parallel_size = 4" in out
    assert "num_attention_heads of 64 cannot be divided among 3 ranks" in run(*command, "3")[2]


def test_plan_of_keys_and_values_in_fp8_has_twice_the_pages(traffic: Path) -> None:
    command = ["plan", "--workload", str(traffic), "--gpu", "h100", "--model", "llama-3.1-8b", "--json"]
    whole, half = (json.loads(run(*command, *more)[1]) for more in ((), ("--kv-cache-dtype", "fp8")))
    tokens = [plan["memory"]["pages"] * plan["recommended"]["settings"]["block_size"] for plan in (whole, half)]
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=0.001)
    assert half["memory"]["weight_bytes"] == whole["memory"]["weight_bytes"]
    out = run(*command[:-1], "--kv-cache-dtype", "fp8")[1]
    assert 'kv_cache_dtype = "fp8"' in out


def test_plan_has_no_page_too_small_for_an_adapter(traffic: Path) -> None:
    """16 rank rows of 4,864 columns are 155,648 bytes: more than 8 tokens of 12,288, or 16 of 6,144 in FP8."""
    command = ["plan", "--workload", str(traffic), "--gpu", "h100", "--model", "qwen2.5-0.5b", "--json"]
    for more, least in (((), 13), (("--kv-cache-dtype", "fp8"), 26)):
        plan = json.loads(run(*command, *more)[1])
        tried = {trial["settings"]["block_size"] for trial in (*plan["tried"], plan["recommended"])}
        assert min(tried) >= least


def test_plan_prints_settings_that_can_be_pasted(traffic: Path) -> None:
    command = [
        "plan",
        "--workload",
        str(traffic),
        "--gpu",
        "h100",
        "--model",
        "qwen2.5-0.5b",
        "--dollars-per-hour",
        "36",
    ]
    code, out, _ = run(*command)
    assert code == 0
    assert "# GPUs: 1 x h100" in out
    assert out.split("[engine]")[1].count("=") == 3
    plan = json.loads(run(*command, "--json")[1])
    best = plan["recommended"]
    assert best["dollars_per_million_tokens"] == pytest.approx(0.01e6 / best["tokens_per_s"])
    assert plan["goals_met"]


def test_description_of_a_log_draws_the_same_traffic() -> None:
    client = {
        "tenant": "t",
        "tenants": 5,
        "rate": 20,
        "cv": 2.0,
        "adapters": 30,
        "popularity": "zipf:1.2",
        "ranks": (8, 64),
        "base": "chat",
        "prompt_tokens": {"distribution": "lognormal", "mu": 5.0, "sigma": 0.5},
        "output_tokens": {"distribution": "lognormal", "mu": 3.0, "sigma": 0.7},
    }
    plain = client | {"tenant": "u", "adapters": 0, "rate": 5, "service_class": "batch", "cv": 1.0, "base": "code"}
    drawn = draw_arrivals(msgspec.convert([client, plain], list[Client]), 200.0, 1)
    log = [
        LoggedRequest(
            arrival_s=at,
            prompt_tokens=len(request.prompt_token_ids),
            output_tokens=output,
            tenant=source.tenant,
            adapter=source.adapter.digest if source.adapter else "",
            rank=source.rank or 16,
            base=source.base,
            service_class=source.service_class,
        )
        for at, source, output, request in drawn.requests()
    ]
    described = msgspec.convert(tomllib.loads(traffic_as_toml(describe_log(log, 'a "quoted" name'))), Traffic)
    assert described.description == 'a "quoted" name'
    by_base = {one.base: one for one in described.clients}
    chat, code = by_base["chat"], by_base["code"]
    assert (chat.rate, code.rate) == (pytest.approx(20, rel=0.1), pytest.approx(5, rel=0.1))
    assert (chat.cv, code.cv) == (pytest.approx(2.0, rel=0.15), pytest.approx(1.0, rel=0.15))
    assert (chat.adapters, code.adapters) == (30, 0)
    assert float(chat.popularity.removeprefix("zipf:")) == pytest.approx(1.2, abs=0.1)
    assert set(chat.ranks) == {8, 64}
    assert code.service_class == "batch"
    assert isinstance(chat.prompt_tokens, LogNormal)
    assert (chat.prompt_tokens.mu, chat.prompt_tokens.sigma) == (
        pytest.approx(5.0, abs=0.05),
        pytest.approx(0.5, abs=0.05),
    )


def test_plan_of_two_bases_plans_each_with_its_part(tmp_path: Path) -> None:
    both = TRAFFIC + TRAFFIC.partition("[[clients]]")[2].replace("chat", "code").join(["[[clients]]", ""])
    path = tmp_path / "both.toml"
    path.write_text(
        both.replace('tenant = "', 'base = "x"\ntenant = "', 1).replace(
            'tenant = "code"', 'base = "y"\ntenant = "code"'
        )
    )
    command = ["plan", "--workload", str(path), "--gpu", "h100", "--json"]
    code, out, _ = run(*command, "--model", "x=qwen2.5-0.5b", "--model", "y=llama-3.1-8b")
    assert code == 0
    plans = json.loads(out)
    assert plans["dollars_per_hour"] == sum(one["dollars_per_hour"] for one in plans["plans"].values())
    weights = {name: one["memory"]["weight_bytes"] for name, one in plans["plans"].items()}
    assert weights == {"x": MODELS["qwen2.5-0.5b"].weight_bytes, "y": MODELS["llama-3.1-8b"].weight_bytes}
    assert "its bases are x, y" in run(*command, "--model", "z=qwen2.5-0.5b")[2]
    assert "has a name" in run(*command, "--model", "qwen2.5-0.5b", "--model", "llama-3.1-8b")[2]


def test_plan_names_what_is_cheaper_and_the_goal_that_it_misses(traffic: Path) -> None:
    device = msgspec.structs.replace(DEVICES["a10g"].slowed(3.0), dollars_per_hour=1.0)
    slower = msgspec.structs.replace(device.slowed(20.0), dollars_per_hour=0.9)
    faster = msgspec.structs.replace(DEVICES["h100"], dollars_per_hour=1.1)
    goals = Goals(ttft_ms=300, itl_ms=60)
    planner = Planner(device, MODELS["qwen2.5-0.5b"], read_workload(traffic), goals)
    plan = planner.plan(gpu="own", others={"slower": slower, "faster": faster})
    assert plan.recommended.settings.gpus > 1
    found = {one.gpu: one for one in plan.alternatives}
    assert all(one.dollars_per_hour < plan.dollars_per_hour for one in plan.alternatives)
    assert found["own"].trial.settings.gpus == plan.recommended.settings.gpus - 1
    assert found["slower"].excess > 1
    assert "misses" in alternative_text(found["slower"], goals)
    assert "goal 60 ms" in alternative_text(found["slower"], goals) or "goal 300 ms" in alternative_text(
        found["slower"], goals
    )
    assert "keeps both goals" in alternative_text(found["faster"], goals)


def test_plan_compares_static_batching_in_one_table(traffic: Path) -> None:
    command = ["plan", "--workload", str(traffic), "--gpu", "a10g", "--model", "qwen2.5-0.5b", "--ttft-ms", "400"]
    out = run(*command, "--compare-static")[1]
    rows = [line.split() for line in out.splitlines() if line.startswith("#   ")]
    assert [row[1] for row in rows if row[1] in ("continuous", "static")][:2] == ["continuous", "static"]
    plan = json.loads(run(*command, "--compare-static", "--json")[1])
    assert all(trial["settings"]["batching"] == "continuous" for trial in plan["tried"])
    same = plan["static"][0]
    assert same["settings"]["gpus"] == plan["recommended"]["settings"]["gpus"]
    assert same["ttft_ms_p50"] > plan["recommended"]["ttft_ms_p50"]


def test_rank_of_a_plan_has_its_share_of_weights_pool_and_adapters() -> None:
    """The plan divides as the engine does: linears by ranks, but A whole for an adapter's column-parallel linears."""
    whole = MODELS["llama-3.1-8b"]
    half = whole.share_of(2)
    assert half.weight_bytes == whole.weight_bytes / 2
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert 0.6 < half.adapter_bytes(16) / whole.adapter_bytes(16) < 0.8
    assert whole.share_of(16).kv_bytes_per_token * 8 == whole.kv_bytes_per_token, "a head is on two ranks"
    sent = 2 * 1 / 2 * 4096 * 2 * (1 + 2 * 32)
    assert half.sent_bytes_per_token == sent
    with pytest.raises(ValueError, match="num_attention_heads of 32 cannot be divided among 3 ranks"):
        whole.share_of(3)


def test_ranks_of_one_machine_share_what_it_has() -> None:
    cpu, gpu = DEVICES["cpu"].of_rank(2), DEVICES["h100"].of_rank(2)
    assert (cpu.memory_bytes, cpu.dollars_per_hour) == (DEVICES["cpu"].memory_bytes / 2, 0.08)
    assert (gpu.memory_bytes, gpu.dollars_per_hour) == (80e9, 6.0)

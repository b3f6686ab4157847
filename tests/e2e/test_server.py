"""A real server process with a real engine: two tenants, the official client, conversations, clients that leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
from peft_uploads import make_adapter
from server_process import Child, Place, served

TENANTS = ("acme", "globex")
BLOCK = 16
LONG = "The harbour master wrote down every ship that came. " * 20
MODELS = {"acme": ["tiny", "acme/one", "acme/two"], "globex": ["tiny", "globex/one"]}


@dataclass(frozen=True)
class Harness:
    server: Child
    keys: dict[str, str]

    def client(self, tenant: str) -> openai.OpenAI:
        return self.server.openai(self.keys[tenant])

    def used(self, tenant: str) -> dict[str | None, tuple[int, int, int]]:
        """(input tokens, output tokens, requests) by model."""
        query = {"start_time": int(time.time()) - 3600, "bucket_width": "1h", "group_by": "model"}
        with self.server.http(self.keys[tenant]) as http:
            page = http.get("/v1/organization/usage/completions", params=query).json()
        sums: dict[str | None, tuple[int, int, int]] = {}
        for result in (result for bucket in page["data"] for result in bucket["results"]):
            counts = (result["input_tokens"], result["output_tokens"], result["num_model_requests"])
            before = sums.get(result["model"], (0, 0, 0))
            sums[result["model"]] = (before[0] + counts[0], before[1] + counts[1], before[2] + counts[2])
        return sums


@pytest.fixture(scope="module")
def harness(base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    place = Place(tmp_path_factory.mktemp("server"), base_dir).prepare()
    keys = {tenant: place.key_of(tenant) for tenant in TENANTS}
    adapters = {
        rank: make_adapter(base_dir, tmp_path_factory.mktemp("adapter"), rank, seed=rank) for rank in (4, 8, 20)
    }
    with served(place) as server:
        harness = Harness(server, keys)
        push(harness, "acme", "one", adapters[4])
        push(harness, "acme", "two", adapters[8])
        push(harness, "globex", "one", adapters[20])
        yield harness
        server.process.terminate()
        assert server.process.wait(60) == 0


def push(harness: Harness, tenant: str, name: str, folder: Path) -> None:
    with harness.server.http(harness.keys[tenant]) as http:
        files = {file.name: (file.name, file.read_bytes()) for file in folder.iterdir() if file.suffix != ".md"}
        assert http.post("/v1/adapters", data={"name": name}, files=files).status_code == 201


def until(happened: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if happened():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def metric_at_rest(server: Child, name: str) -> float:
    """Read a metric once the engine's statistics, which are sent once a second and at rest, have come."""
    threading.Event().wait(1.5)
    return server.metric(name)


def test_models_answer_the_same_alone_and_together(harness: Harness) -> None:
    asked = [(tenant, model) for tenant, models in MODELS.items() for model in models]

    def ask(who: tuple[str, str]) -> str:
        tenant, model = who
        extra = {"return_token_ids": True, "ignore_eos": True}
        answer = harness.client(tenant).completions.create(
            model=model, prompt="The quick brown fox", temperature=0, max_tokens=24, extra_body=extra
        )
        assert answer.model == (model if model == "tiny" else f"{model}@1")
        return str(answer.choices[0].model_extra)

    alone = [ask(who) for who in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(ask, asked))
    assert together == alone
    assert alone[0] == alone[3], "the base answers both tenants alike"
    assert len(set(alone)) == len(alone) - 1, "no two adapters answer alike"


def test_usage_equals_the_sum_of_the_answers(harness: Harness) -> None:
    before = {tenant: harness.used(tenant) for tenant in TENANTS}
    counted: dict[tuple[str, str], list[int]] = {}
    for tenant, models in MODELS.items():
        for model in models:
            for stream in (False, True):
                usage, name = answered(harness.client(tenant), model, stream=stream)
                total = counted.setdefault((tenant, name), [0, 0, 0])
                for i, value in enumerate((usage.prompt_tokens, usage.completion_tokens, 1)):
                    total[i] += value
    for (tenant, name), total in counted.items():
        earlier = before[tenant].get(name, (0, 0, 0))
        assert harness.used(tenant)[name] == tuple(a + b for a, b in zip(earlier, total, strict=True))


def answered(client: openai.OpenAI, model: str, *, stream: bool) -> tuple[openai.types.CompletionUsage, str]:
    asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "seed": 3}
    if not stream:
        whole = client.chat.completions.create(**asked)
        assert whole.usage is not None
        return whole.usage, whole.model
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage is not None
    return chunks[-1].usage, chunks[-1].model


def test_seeded_answer_is_the_same_streamed_and_whole(harness: Harness) -> None:
    asked = {"model": "acme/one", "prompt": ["a", "b"], "n": 2, "seed": 11, "max_tokens": 20, "logprobs": 1}
    whole = harness.client("acme").completions.create(**asked)
    texts = dict.fromkeys(range(4), "")
    tokens: dict[int, list[str]] = {i: [] for i in range(4)}
    for chunk in harness.client("acme").completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert [choice.text for choice in whole.choices] == list(texts.values())
    assert [choice.logprobs.tokens for choice in whole.choices if choice.logprobs] == list(tokens.values())


def test_disconnect_frees_pages_and_is_billed(harness: Harness) -> None:
    before = harness.used("acme").get("acme/two@1", (0, 0, 0))
    extra = {"ignore_eos": True}
    stream = harness.client("acme").completions.create(
        model="acme/two", prompt="x" * 50, max_tokens=8000, stream=True, extra_body=extra
    )
    for _ in range(20):
        next(stream)
    until(lambda: harness.server.metric("loramux_engine_pages_kv") > 0)
    stream.close()
    until(lambda: harness.server.metric("loramux_engine_running") == 0)
    until(lambda: harness.server.metric("loramux_engine_pages_kv") == 0)
    until(lambda: harness.used("acme")["acme/two@1"][2] == before[2] + 1)
    after = harness.used("acme")["acme/two@1"]
    assert after[0] - before[0] == 51
    assert 20 <= after[1] - before[1] < 8000


def test_another_tenants_adapter_gets_the_404_of_a_missing_one(harness: Harness) -> None:
    for name in ("acme/one", "acme/none"):
        with pytest.raises(openai.NotFoundError):
            harness.client("globex").completions.create(model=name, prompt="x")


def ask(client: openai.OpenAI, model: str, *said: str, **keywords: object) -> openai.types.CompletionUsage:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    asked = {"model": model, "messages": messages, "max_tokens": 5, "temperature": 0, **keywords}
    if not asked.get("stream"):
        return client.chat.completions.create(**asked).usage
    return list(client.chat.completions.create(**asked, stream_options={"include_usage": True}))[-1].usage


def cached(usage: openai.types.CompletionUsage) -> int:
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(("model", "stream"), [("tiny", False), ("acme/one", True)])
def test_prefix_cache_second_turn_computes_only_new_tokens(harness: Harness, model: str, stream: bool) -> None:
    server, client = harness.server, harness.client("acme")
    first = ask(client, model, LONG, stream=stream)
    assert first.prompt_tokens > 1000
    assert cached(first) == 0
    computed = metric_at_rest(server, "loramux_engine_prompt_tokens_total")
    second = ask(client, model, LONG, "I see.", "Which was the last?", stream=stream)
    assert cached(second) == first.prompt_tokens // BLOCK * BLOCK
    new = metric_at_rest(server, "loramux_engine_prompt_tokens_total") - computed
    assert new == second.prompt_tokens - cached(second)
    assert new < second.prompt_tokens - first.prompt_tokens + BLOCK
    assert server.metric("loramux_engine_pages_kv_cached") > 1000 // BLOCK


def test_prefix_cache_finds_generated_tokens_only_for_its_tenant(harness: Harness) -> None:
    asked = {"model": "tiny", "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    prompt = list(LONG.encode()[:500])
    extra = {"ignore_eos": True, "return_token_ids": True}
    answer = harness.client("acme").completions.create(prompt=prompt, **asked | {"extra_body": extra})
    said = answer.choices[0].model_extra["token_ids"]
    assert len(said) == 40
    longer = [*prompt, *said, 66]
    turn = {tenant: harness.client(tenant).completions.create(prompt=longer, **asked) for tenant in TENANTS}
    assert cached(turn["acme"].usage) == (500 + 40 - 1) // BLOCK * BLOCK
    assert cached(turn["globex"].usage) == 0
    assert turn["acme"].choices[0].text == turn["globex"].choices[0].text


def test_usage_counts_cached_tokens_and_bills_the_prompt_once(harness: Harness) -> None:
    client = harness.client("globex")
    text = "Something else entirely. " * 30
    first = ask(client, "tiny", text, n=3)
    again = ask(client, "tiny", text, n=3)
    assert first.prompt_tokens == again.prompt_tokens
    assert cached(first) == 0
    assert cached(again) == (again.prompt_tokens - 1) // BLOCK * BLOCK

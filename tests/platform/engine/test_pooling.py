"""Prompts that become vectors, in steps with sequences that generate: equal to transformers and PEFT in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors
import torch
import transformers
from adapter_zoo import FAMILIES, ON_RANKS, SMALL, Asked, Zoo, load, to_request
from delayed_runner import late_engine
from safetensors.torch import load_file, save_file
from task_adapters import TaskAdapter

from loramux.common.units import TokenCounts
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.cuda_graphs import host_syncs_of
from loramux.engine.execution.runner import Pooler, decoder_of
from loramux.engine.messages import Request, SamplingParams, ServiceClass, TokenEvent
from loramux.engine.scheduling.sequence import Chunk, Sequence
from loramux_adapters.bank import PagedRows, ResidentClassifier
from loramux_adapters.convert.renaming import rename_adapter
from loramux_adapters.errors import BaseMismatch
from loramux_adapters.plan import PlanLimits, inspect_adapter
from loramux_adapters.weights import Matrix, MatrixKind

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    made = Zoo(request.param, tmp_path_factory.mktemp(request.param))
    made.make_adapters()
    return made


def pooled(zoo: Zoo, name: str, adapter: str | None, prompt: tuple[int, ...], pooling: str) -> Request:
    request = to_request(zoo, Asked(name, adapter, prompt, 1))
    return msgspec.structs.replace(request, pooling=pooling)


def run(engine: Engine, requests: list[Request], *running: str) -> dict[str, list[TokenEvent]]:
    """Run the requests and those that are `running` to their ends; two arrive before each step."""
    waiting, events = list(requests), {name: [] for name in (*running, *(request.id for request in requests))}
    while waiting or not engine.is_idle:
        for request in waiting[:2]:
            engine.submit(request)
        del waiting[:2]
        report = engine.step()
        for event in report.events if report else []:
            assert event.finish_reason != "error", event.fault
            events[event.request_id].append(event)
    return events


@torch.no_grad()
def expected(zoo: Zoo, adapter: str | None, prompt: tuple[int, ...], pooling: str) -> np.ndarray:
    """PEFT's hidden states after the last norm, pooled."""
    model = zoo._reference
    decoder = model.get_base_model().get_decoder()
    ids = torch.tensor([prompt])
    if adapter is None:
        with model.disable_adapter():
            hidden = decoder(input_ids=ids).last_hidden_state[0]
    else:
        model.set_adapter(adapter)
        hidden = decoder(input_ids=ids).last_hidden_state[0]
    return (hidden[-1] if pooling == "last" else hidden.mean(dim=0)).numpy()


def vector(event: TokenEvent) -> np.ndarray:
    return np.frombuffer(event.pooled, dtype=np.float32)


def rows(events: list[TokenEvent]) -> np.ndarray:
    """Return the numbers of every token of a prompt; rows that come again take the place of the earlier ones."""
    *parts, last = events
    assert {event.finish_reason for event in parts} <= {None}
    assert last.finish_reason == "stop"
    found: list[np.ndarray] = []
    for event in events:
        first, end = event.pooled_tokens
        assert first <= len(found)
        found[first:end] = vector(event).reshape(end - first, -1)
    return np.stack(found)


def prompts(count: int, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    rng = random.Random(7)
    return [tuple(rng.randrange(3, 97) for _ in range(lengths[i % len(lengths)])) for i in range(count)]


@ON_RANKS
def test_vectors_with_generating_sequences_are_pefts(zoo: Zoo, ranks: int) -> None:
    """Chunks of 16 tokens cut the long prompts; the same prompts again are partly found in the prefix cache."""
    adapters = [None, "plain", "rslora", "attention"]
    texts = prompts(8, (1, 5, 40, 17)) * 2
    asked = [pooled(zoo, f"p{i}", adapters[i % 4], text, ("last", "mean")[i // 4 % 2]) for i, text in enumerate(texts)]
    generating = [Asked(f"g{i}", adapters[i % 4], text, 6) for i, text in enumerate(prompts(6, (9, 30)))]
    requests = asked + [to_request(zoo, one) for one in generating]
    random.Random(1).shuffle(requests)
    engine = zoo.engine(max_num_batched_tokens=16, tensor_parallel_size=ranks)
    events = run(engine, requests)
    engine.close()
    for i, request in enumerate(asked):
        (event,) = events[request.id]
        assert (event.token_id, event.finish_reason) == (None, "stop")
        wanted = expected(zoo, adapters[i % 4], texts[i], request.pooling)
        np.testing.assert_allclose(vector(event), wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()))
    for one in generating:
        assert [event.token_id for event in events[one.name]] == zoo.answer(one)


def test_prompt_is_counted_and_nothing_generated(zoo: Zoo) -> None:
    (text,) = prompts(1, (40,))
    engine = zoo.engine(max_num_batched_tokens=16)
    first, again, mean = (
        pooled(zoo, name, "plain", text, how) for name, how in (("a", "last"), ("b", "last"), ("c", "mean"))
    )
    counts = [run(engine, [request])[request.id][0].count.tokens for request in (first, again, mean)]
    assert counts == [
        TokenCounts(prompt=40, output=0),
        TokenCounts(prompt=40, cached=32, output=0),
        TokenCounts(prompt=40, output=0),
    ]
    assert engine.stats().running == 0


def test_mean_of_preempted_prompts_is_of_every_token_once(zoo: Zoo) -> None:
    """A pool too small for all at once: sequences are preempted in the middle of their prompts."""
    texts = prompts(6, (90, 70))
    asked = [pooled(zoo, f"p{i}", None, text, "mean") for i, text in enumerate(texts)]
    generating = [to_request(zoo, Asked(f"g{i}", None, text, 60)) for i, text in enumerate(prompts(6, (20,)))]
    events = run(zoo.engine(max_num_batched_tokens=16, pool_bytes=200_000), [*generating, *asked])
    for request, text in zip(asked, texts, strict=True):
        wanted = expected(zoo, None, text, "mean")
        np.testing.assert_allclose(
            vector(events[request.id][0]), wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max())
        )


@pytest.fixture(scope="module")
def classifiers(zoo: Zoo) -> dict[str, TaskAdapter]:
    """Heads of three sizes; one adapter has trained embedding rows too."""
    made = {"three": (3, {}), "one": (1, {"target_modules": ["q_proj", "v_proj"]}), "many": (70, {"r": 4})}
    return {
        name: TaskAdapter(zoo.base, zoo.adapters / name, seed, num_labels, **lora)
        for seed, (name, (num_labels, lora)) in enumerate(made.items())
    }


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return found.shape == wanted.shape and np.abs(found - wanted).max() <= TOLERANCE * max(1.0, np.abs(wanted).max())


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Zoo.engine, id="in turn"),
        pytest.param(lambda *a, **k: late_engine(*a, **k)[0], id="one ahead"),
        pytest.param(partial(Zoo.engine, tensor_parallel_size=2), id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_classifiers_with_different_heads_in_one_batch_are_pefts(
    zoo: Zoo, classifiers: dict[str, TaskAdapter], make: Callable[..., Engine]
) -> None:
    texts, names = prompts(9, (1, 40, 17)), list(classifiers)
    asked = [pooled(zoo, f"c{i}", names[i % 3], text, "classify") for i, text in enumerate(texts)]
    asked += [
        pooled(zoo, f"v{i}", (None, "plain")[i % 2], text, ("last", "mean")[i % 2]) for i, text in enumerate(texts)
    ]
    generating = [Asked(f"g{i}", (None, "plain")[i % 2], text, 6) for i, text in enumerate(prompts(4, (9, 30)))]
    requests = asked + [to_request(zoo, one) for one in generating]
    random.Random(2).shuffle(requests)
    engine = make(zoo, max_num_batched_tokens=16)
    events = run(engine, requests)
    engine.close()
    for i, text in enumerate(texts):
        assert close(vector(events[f"c{i}"][0]), classifiers[names[i % 3]].logits(text)), names[i % 3]
        assert close(vector(events[f"v{i}"][0]), expected(zoo, (None, "plain")[i % 2], text, ("last", "mean")[i % 2]))
    for one in generating:
        assert [event.token_id for event in events[one.name]] == zoo.answer(one)


@pytest.fixture(scope="module")
def token_classifiers(zoo: Zoo) -> dict[str, TaskAdapter]:
    """Classifiers of tokens, with heads of three sizes."""
    made = {"tokens3": (3, {}), "tokens1": (1, {"target_modules": ["q_proj", "v_proj"]}), "tokens70": (70, {"r": 4})}
    return {
        name: TaskAdapter(zoo.base, zoo.adapters / name, seed, num_labels, of_tokens=True, **lora)
        for seed, (name, (num_labels, lora)) in enumerate(made.items(), start=20)
    }


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Zoo.engine, id="in turn"),
        pytest.param(lambda *a, **k: late_engine(*a, **k)[0], id="one ahead"),
        pytest.param(partial(Zoo.engine, tensor_parallel_size=2), id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_every_token_has_pefts_classes_in_batches_with_everything_else(
    zoo: Zoo,
    classifiers: dict[str, TaskAdapter],
    token_classifiers: dict[str, TaskAdapter],
    make: Callable[..., Engine],
) -> None:
    """Chunks of 16 tokens cut the long prompts; repeated prompts find nothing in the prefix cache."""
    texts, names = prompts(9, (1, 40, 17)), list(token_classifiers)
    asked = [pooled(zoo, f"t{i}", names[i % 3], text, "token_classify") for i, text in enumerate(texts * 2)]
    asked += [pooled(zoo, f"c{i}", "three", text, "classify") for i, text in enumerate(texts)]
    asked += [pooled(zoo, f"m{i}", "plain", text, "mean") for i, text in enumerate(texts)]
    generating = [Asked(f"g{i}", (None, "plain")[i % 2], text, 6) for i, text in enumerate(prompts(4, (9, 30)))]
    requests = asked + [to_request(zoo, one) for one in generating]
    random.Random(3).shuffle(requests)
    engine = make(zoo, max_num_batched_tokens=16)
    events = run(engine, requests)
    engine.close()
    for i, text in enumerate(texts * 2):
        wanted = token_classifiers[names[i % 3]].logits(text)
        assert wanted.shape == (len(text), (3, 1, 70)[i % 3])
        assert close(rows(events[f"t{i}"]), wanted), names[i % 3]
        assert events[f"t{i}"][-1].count.tokens == TokenCounts(prompt=len(text))
    for i, text in enumerate(texts):
        assert close(vector(events[f"c{i}"][0]), classifiers["three"].logits(text))
        assert close(vector(events[f"m{i}"][0]), expected(zoo, "plain", text, "mean"))
    for one in generating:
        assert [event.token_id for event in events[one.name]] == zoo.answer(one)


OTHER_LINEARS = {
    "phi3": ["qkv_proj", "down_proj"],
    "qwen3_moe": ["q_proj", "o_proj"],
    "gpt_oss": ["q_proj", "v_proj"],
    "qwen3_next": ["q_proj", "in_proj_qkvz"],
    "deepseek_v3": ["q_a_proj", "kv_b_proj"],
}
"""Linears of attention, by family."""


@pytest.mark.parametrize("family", OTHER_LINEARS)
def test_every_token_has_pefts_classes_on_other_families(tmp_path: Path, family: str) -> None:
    """Mixtures, joined linears, states of linear attention, a compressed KV."""
    zoo = Zoo(family, tmp_path)
    adapter = TaskAdapter(zoo.base, zoo.adapters / "t", 3, 4, of_tokens=True, target_modules=OTHER_LINEARS[family])
    texts = prompts(3, (1, 40, 17))
    asked = [pooled(zoo, f"t{i}", "t", text, "token_classify") for i, text in enumerate(texts)]
    events = run(zoo.engine(), asked)
    for request, text in zip(asked, texts, strict=True):
        assert close(rows(events[request.id]), adapter.logits(text))


def test_head_of_either_name_with_or_without_a_bias_is_served(zoo: Zoo, tmp_path: Path) -> None:
    """transformers' families call it `score` or `classifier`; `token_classification_bias` leaves the bias out."""
    adapter = TaskAdapter(zoo.base, tmp_path / "a", 3, 4, of_tokens=True)
    tensors = load_file(tmp_path / "a/adapter_model.safetensors")
    bias = tensors.pop("base_model.model.score.bias")
    tensors["base_model.model.classifier.weight"] = tensors.pop("base_model.model.score.weight")
    folder = zoo.adapters / "renamed"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((tmp_path / "a/adapter_config.json").read_bytes())
    save_file(tensors, folder / "adapter_model.safetensors")
    (text,) = prompts(1, (17,))
    events = run(zoo.engine(), [pooled(zoo, "x", "renamed", text, "token_classify")])
    assert close(rows(events["x"]), adapter.logits(text) - bias.numpy())
    del tensors["base_model.model.classifier.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(BaseMismatch, match=r"TOKEN_CLS, and the file has no .*score.weight"):
        inspect_adapter(folder, load(zoo.base)[0].base, PlanLimits())


def test_rows_of_a_long_prompt_come_chunk_by_chunk(zoo: Zoo, token_classifiers: dict[str, TaskAdapter]) -> None:
    """No event holds more rows than a step has tokens, and the last one alone ends the request."""
    (text,) = prompts(1, (256,))
    request = pooled(zoo, "x", "tokens3", text, "token_classify")
    events = run(zoo.engine(max_num_batched_tokens=64), [request])["x"]
    assert [event.pooled_tokens for event in events] == [(0, 64), (64, 128), (128, 192), (192, 256)]
    assert close(rows(events), token_classifiers["tokens3"].logits(text))


def test_classes_of_a_preempted_prompt_are_of_every_token(zoo: Zoo, token_classifiers: dict[str, TaskAdapter]) -> None:
    """Requests of a higher class take its pages in the middle of the prompt."""
    (text,) = prompts(1, (250,))
    slow = msgspec.structs.replace(
        pooled(zoo, "x", "tokens3", text, "token_classify"), service_class=ServiceClass.BATCH
    )
    engine = zoo.engine(max_num_batched_tokens=16, pool_bytes=600_000 if zoo.family == "gemma2" else 400_000)
    engine.submit(slow)
    events: list[TokenEvent] = []
    while len(events) < 5 and not engine.is_idle:
        report = engine.step()
        events += report.events if report else []
    urgent = [Asked(f"g{i}", None, text, 30) for i, text in enumerate(prompts(4, (150,)))]
    asked = [msgspec.structs.replace(to_request(zoo, one), service_class=ServiceClass.INTERACTIVE) for one in urgent]
    events += run(engine, [*asked], slow.id)[slow.id]
    assert engine.stats().preemptions > 0
    assert sum(end - first for first, end in (event.pooled_tokens for event in events)) > len(text)
    assert close(rows(events), token_classifiers["tokens3"].logits(text))


def test_classes_of_tokens_without_a_head_are_refused_by_the_engine(zoo: Zoo) -> None:
    (text,) = prompts(1, (90,))
    engine = zoo.engine(max_num_batched_tokens=16)
    engine.submit(pooled(zoo, "x", "plain", text, "token_classify"))
    events = []
    while not engine.is_idle:
        report = engine.step()
        events += report.events if report else []
    assert [event.fault.code for event in events] == ["not_a_classifier"]
    assert engine.stats().pages_kv == 0


def test_adapter_for_vectors_is_renamed_and_pefts(zoo: Zoo) -> None:
    """PEFT trained it on the model without its head, whose modules have shorter names."""
    uploaded, served = zoo.adapters / "uploaded", zoo.adapters / "vectors"
    adapter = TaskAdapter(zoo.base, uploaded, 5)
    served.mkdir()
    loaded, settings = load(zoo.base, max_num_batched_tokens=16)
    assert rename_adapter(uploaded, served, loaded.base, PlanLimits()).renamed == len(list(adapter_tensors(uploaded)))
    (text,) = prompts(1, (40,))
    asked = [pooled(zoo, how, "vectors", text, how) for how in ("last", "mean")]
    events = run(build_engine(loaded, settings, wake=lambda: None), asked)
    for how in ("last", "mean"):
        assert close(vector(events[how][0]), adapter.vector(text, how))


def adapter_tensors(folder: Path) -> list[str]:
    with safetensors.safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return list(file.keys())


def test_classify_without_a_head_is_refused_by_the_engine(zoo: Zoo) -> None:
    engine = zoo.engine()
    engine.submit(pooled(zoo, "x", "plain", (5, 6), "classify"))
    events = []
    while not engine.is_idle:
        report = engine.step()
        events += report.events if report else []
    assert [event.fault.code for event in events] == ["not_a_classifier"]


def test_prompt_as_long_as_the_context_is_pooled(zoo: Zoo) -> None:
    """Nothing is generated, so that no room is needed for it."""
    (text,) = prompts(1, (256,))
    request = pooled(zoo, "x", None, text, "last")
    assert close(vector(run(zoo.engine(), [request])["x"][0]), expected(zoo, None, text, "last"))


def test_cancelled_request_leaves_no_sum(zoo: Zoo) -> None:
    engine = zoo.engine(max_num_batched_tokens=16)
    (text,) = prompts(1, (90,))
    engine.submit(pooled(zoo, "x", None, text, "mean"))
    engine.step()
    assert engine._runner._pooler._sums
    engine.cancel("x")
    while not engine.is_idle:
        engine.step()
    assert not engine._runner._pooler._sums
    assert engine.stats().pages_kv == 0


def test_cancelled_prompt_counts_the_tokens_that_were_computed(zoo: Zoo) -> None:
    engine = zoo.engine(max_num_batched_tokens=16)
    (text,) = prompts(1, (90,))
    engine.submit(pooled(zoo, "x", None, text, "mean"))
    engine.step()
    engine.cancel("x")
    events = []
    while not engine.is_idle:
        report = engine.step()
        events += report.events if report else []
    assert [event.count.tokens for event in events] == [TokenCounts(prompt=16)]
    assert engine.stats().ended == TokenCounts(prompt=16)


def test_pooling_never_waits_for_the_device() -> None:
    """A GPU works on while the host plans: the vectors are read with the step's tokens."""
    matrix = Matrix("score", MatrixKind.CLASSIFIER, 5, 8, fills_pages=True)
    matrix = Matrix("score", MatrixKind.CLASSIFIER, 5, 9, fills_pages=True)
    head = ResidentClassifier((PagedRows(torch.randn(128), 32, [2, 0], matrix),))
    chunks = []
    for number, how in enumerate(("last", "mean", "classify", "token_classify")):
        sampling = SamplingParams(max_tokens=1)
        request = Request(id=how, tenant="t", prompt_token_ids=[1, 2, 3], sampling=sampling, pooling=how)
        chunks.append((3 * number, Chunk(Sequence(request, 0.0), 0, 3)))
    pooler, hidden = Pooler(lambda _: head), torch.randn(12, 8)
    assert host_syncs_of(lambda: pooler.pool(hidden, chunks)) == set()
    assert [len(event.pooled) for event in pooler.pool(hidden, chunks).events()] == [32, 32, 20, 60]


def test_decoder_of_llama4_is_the_model_without_its_head() -> None:
    """transformers calls the whole model its decoder."""
    config, extra = FAMILIES["llama4"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(**SMALL | extra))
    assert decoder_of(model) is model.model

"""The base's own head for multi-token prediction: its drafts are those of a plain reference, and no answer changes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adapter_zoo import Asked, Zoo, load, make_engine, serve, to_request
from drafting_heads import Drafted, always_drafts, check_drafts, draft_what_follows, mtp_engine
from llguidance import LLMatcher
from multi_token_reference import MATRICES, ReferenceHead, base_of, states_of, train
from preempting import preempting
from quantized_zoo import CHECKPOINTS, QuantizedZoo
from safetensors.torch import load_file, save_file
from tiny_base import byte_tokenizer
from transformers.modeling_layers import MtpModel

from loramux.engine.engine import Engine
from loramux.engine.execution.attention import UnsupportedModel
from loramux.engine.execution.checkpoint import load_checkpoint, read_config
from loramux.engine.execution.memory_plan import MemoryPlan, plan_memory
from loramux.engine.execution.multi_token import MultiTokenHead
from loramux.engine.messages import Constraint, Request, SamplingParams, TokenEvent
from loramux_adapters.base import describe_base
from loramux_adapters.sharding import Sharding

FAMILIES = {
    "qwen3_5": {},
    "qwen3_5 without states": {"layer_types": ["full_attention"] * 5},
    "qwen3_next": {},
    "qwen3_5_moe": {},
    "glm4_moe": {"attention_bias": True},
    "deepseek_v3": {},
    "glm4_moe_lite": {},
    "ernie4_5_moe": {},
}
"""Fields of configs, by family."""
ADAPTERS = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "narrow": {"r": 3, "lora_alpha": 9, "target_modules": ["q_proj", "o_proj"]},
}
PROMPTS = [tuple(random.Random(seed).randrange(3, 97) for _ in range(12)) for seed in range(6)]
TRAINED = [Asked(f"t{i}", None, prompt, 48) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module", params=FAMILIES)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A base with a head of random weights."""
    family = request.param.partition(" ")[0]
    made = with_adapters(Zoo(family, tmp_path_factory.mktemp(family), **FAMILIES[request.param]))
    head = ReferenceHead.random(base_of(made.base), seed=1)
    head.save(made.base, one_by_one=family not in ("qwen3_5_moe", "glm4_moe_lite"), with_copies=family == "deepseek_v3")
    return made


@pytest.fixture(scope="module", params=["qwen3_5", "deepseek_v3"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """A base whose head was trained on the base's own answers to PROMPTS."""
    made = with_adapters(Zoo(request.param, tmp_path_factory.mktemp("trained")))
    model = base_of(made.base)
    head = ReferenceHead.random(model, seed=2)
    steps = 400 if request.param == "qwen3_5" else 600
    assert train(head, model, [[*one.prompt, *made.answer(one)] for one in TRAINED], steps) < 0.2
    head.save(made.base)
    return made


def with_adapters(zoo: Zoo) -> Zoo:
    for seed, (name, recipe) in enumerate(ADAPTERS.items()):
        zoo.make_adapter(name, recipe, seed)
    return zoo


def some_requests(seed: int = 0, count: int = 10) -> list[Asked]:
    rng = random.Random(seed)
    shared = tuple(rng.randrange(3, 97) for _ in range(40))
    lengths = (1, 5, 17, 70, 33, 2, 16)
    names = (None, *ADAPTERS)
    found = []
    for i in range(count):
        own = tuple(rng.randrange(3, 97) for _ in range(lengths[i % 7]))
        found.append(Asked(f"r{i}", names[i % 3], shared + own if i % 2 else own, 9))
    return found


@pytest.mark.parametrize("block_size", [16, 37])
def test_head_in_chunks_after_cached_prefixes_and_preempted_drafts_as_the_reference_does(
    zoo: Zoo, block_size: int
) -> None:
    engine = preempting(mtp_engine(zoo, max_num_batched_tokens=29, block_size=block_size), every=7)
    engine._runner.bank.pool.fill_(float("nan"))  # a page's earlier contents change nothing
    drafted, asked = Drafted(engine), some_requests()
    for _ in range(2):
        got = serve(zoo, engine, asked, arrivals=[i // 3 for i in range(len(asked))])
        assert got == {one.name: zoo.answer(one) for one in asked}
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.pages_kv == 0
    assert {sequence.digest for sequence, *_ in drafted.seen} == {None, *(f"sha256:{name}" for name in ADAPTERS)}
    check_drafts(zoo, drafted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_head_that_does_not_draft_is_left_out_of_the_base_and_its_plan(zoo: Zoo, tmp_path: Path, ranks: int) -> None:
    """Also if transformers knows no head after as many layers."""
    engine = zoo.engine(tensor_parallel_size=ranks)
    try:
        asked = some_requests(count=3)
        assert serve(zoo, engine, asked) == {one.name: zoo.answer(one) for one in asked}
    finally:
        engine.close()
    shutil.copytree(zoo.base, tmp_path / "base")
    without_head(tmp_path / "base")
    plans = []
    for base in (zoo.base, tmp_path / "base"):
        _, settings = load(base)
        sharding = Sharding(read_config(base), ranks)
        plans.append(plan_memory(base, describe_base(base), sharding, 4, 4 << 20, settings.engine))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_reference_computes_what_transformers_own_heads_do(family: str, tmp_path: Path) -> None:
    made = Zoo(family, tmp_path)
    ReferenceHead.random(base_of(made.base), seed=3).save(made.base, one_by_one=True)
    model = base_of(made.base)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    theirs = MtpModel.from_pretrained(model).eval()
    tokens = list(PROMPTS[0])
    hidden = states_of(model, tokens)[:-1]
    with torch.no_grad():
        places, ids = torch.arange(1, len(tokens))[None], torch.tensor([tokens[1:]])
        expected = theirs.forward_layer(0, hidden[None], places, None, input_ids=ids)[0]
    reference = ReferenceHead.read(model, made.base)
    torch.testing.assert_close(
        reference.results(reference.embedding[tokens[1:]], hidden), expected, atol=1e-4, rtol=1e-4
    )


def test_routers_of_a_head_have_the_dtypes_of_the_bases(tmp_path: Path) -> None:
    zoo = Zoo("deepseek_v3", tmp_path, torch.bfloat16)
    ReferenceHead.random(base_of(zoo.base)).save(zoo.base, torch.bfloat16)
    model = load_checkpoint(zoo.base, "bfloat16", torch.device("cpu"))
    head: Any = MultiTokenHead.load(model, zoo.base)
    layers = model.get_decoder().layers[-1], head.layers[0]
    of_base, own = ({name: one.dtype for name, one in layer.state_dict().items()} for layer in layers)
    assert own == of_base
    assert {own["mlp.gate.weight"], own["self_attn.o_proj.weight"]} == {torch.float32, torch.bfloat16}


def one_layer_head(root: Path) -> tuple[Zoo, ReferenceHead]:
    zoo = with_adapters(Zoo("glm4_moe", root))
    return zoo, ReferenceHead.random(base_of(zoo.base), seed=5)


def check_answers_and_drafts(zoo: Zoo) -> None:
    engine = mtp_engine(zoo)
    drafted, asked = Drafted(engine), some_requests(count=4)
    assert serve(zoo, engine, asked) == {one.name: zoo.answer(one) for one in asked}
    check_drafts(zoo, drafted)


def test_head_with_its_own_embedding_and_output_matrix_drafts_by_them(tmp_path: Path) -> None:
    zoo, head = one_layer_head(tmp_path)
    generator = torch.Generator().manual_seed(6)
    head.weights |= {name: torch.randn(head.embedding.shape, generator=generator) / 8 for name in MATRICES}
    head.save(zoo.base)
    check_answers_and_drafts(zoo)


def test_copies_of_the_bases_matrices_take_no_memory(tmp_path: Path) -> None:
    zoo, head = one_layer_head(tmp_path)
    taken = []
    for with_copies in (False, True):
        head.save(zoo.base, with_copies=with_copies)
        loaded, settings = load(zoo.base, speculation="mtp")
        sharding = Sharding(read_config(zoo.base), 1)
        plan = plan_memory(zoo.base, describe_base(zoo.base), sharding, 4, 4 << 20, settings.engine)
        taken.append((loaded.weight_bytes, plan.weight_bytes))
    assert taken[0] == taken[1]


def test_first_of_several_heads_drafts_all_tokens(tmp_path: Path) -> None:
    zoo, head = one_layer_head(tmp_path)
    ReferenceHead.random(base_of(zoo.base), seed=7).save(zoo.base)
    rewrite(zoo.base, lambda tensors: {name.replace("layers.3.", "layers.4."): one for name, one in tensors.items()})
    head.save(zoo.base)
    check_answers_and_drafts(zoo)


def test_layer_beyond_the_config_that_is_no_head_is_refused(tmp_path: Path) -> None:
    zoo, head = one_layer_head(tmp_path)
    head.save(zoo.base)
    path = zoo.base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))
    with pytest.raises(UnsupportedModel, match=r"for which its config.json has no place: model.layers.2\."):
        zoo.engine()


@pytest.mark.parametrize("is_coded", [True, False])
@pytest.mark.parametrize(("family", "checkpoint"), [("qwen3_5", "fp8 blocks"), ("deepseek_v3", "packed int4")])
def test_head_of_a_quantized_base_drafts_by_its_codes_or_unquantized(
    tmp_path: Path, family: str, checkpoint: str, is_coded: bool
) -> None:
    zoo = QuantizedZoo(family, tmp_path, (), checkpoint)
    head = ReferenceHead.random(base_of(zoo.base), seed=8)
    codes: dict[str, torch.Tensor] = {}
    for name, weight in [*head.weights.items()] if is_coded else []:
        if name.startswith("layers.0.") and weight.ndim == 2 and "gate.weight" not in name:
            stored, head.weights[name] = CHECKPOINTS[checkpoint][1](weight)
            linear = head.stored_name(name, head.config.num_hidden_layers).removesuffix(".weight")
            codes |= {f"{linear}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    head.save(zoo.base)
    head.save(zoo.quantized)
    linears = {name.rpartition(".")[0] for name in codes}
    rewrite(zoo.quantized, lambda held: {n: t for n, t in held.items() if n.rpartition(".")[0] not in linears} | codes)
    assert bool(codes) == is_coded
    asked = [Asked(f"r{i}", None, prompt, 8) for i, prompt in enumerate(PROMPTS[:3])]
    plain = make_engine(zoo.quantized)
    engine = make_engine(zoo.quantized, speculation="mtp", max_draft_tokens=4)
    always_drafts(engine)
    drafted = Drafted(engine)
    assert serve(zoo, engine, asked) == serve(zoo, plain, asked) == {one.name: zoo.answer(one) for one in asked}
    check_drafts(zoo, drafted)


def test_head_after_a_swap_drafts_as_the_reference_does(trained: Zoo) -> None:
    engine = preempting(mtp_engine(trained, swap_bytes=1 << 22))
    engine.scheduler.memory.swap.pays = lambda _: True
    drafted, asked = Drafted(engine), some_requests(count=5)
    assert serve(trained, engine, asked) == {one.name: trained.answer(one) for one in asked}
    assert engine.stats().preemptions > 0
    check_drafts(trained, drafted)


def test_trained_head_saves_steps_and_most_of_its_drafts_are_accepted(trained: Zoo) -> None:
    answers = {one.name: trained.answer(one) for one in TRAINED}
    plain = trained.engine()
    assert serve(trained, plain, TRAINED) == answers
    engine = mtp_engine(trained)
    engine.scheduler.speculation.count_paying = lambda rate, rows, expected, most, ahead_seconds=0.0: min(most, 2)
    assert serve(trained, engine, TRAINED) == answers
    stats = engine.stats()
    assert stats.accepted_tokens > 0.5 * stats.drafted_tokens > 0
    assert stats.steps < 0.8 * plain.stats().steps
    assert stats.output_tokens == stats.ended.output == sum(one.output for one in TRAINED)


def events_of(engine: Engine, zoo: Zoo, asked: list[Asked], **steer: Any) -> dict[str, list[TokenEvent]]:
    told: dict[str, list[TokenEvent]] = {one.name: [] for one in asked}
    for one in asked:
        engine.submit(to_request(zoo, one, **steer))
    while not engine.is_idle:
        report = engine.step()
        for event in report.events if report else []:
            told[event.request_id].append(event)
    return told


PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {9: 1.5}, "logprobs": 2}


@pytest.mark.parametrize(
    "steer",
    [
        pytest.param({}, id="greedy"),
        pytest.param({"temperature": 0.7, "seed": 3}, id="seeded"),
        pytest.param(PENALTIES | {"temperature": 1.0, "seed": 5, "top_p": 0.9}, id="penalties"),
        pytest.param({"stop_token_ids": tuple(range(3, 60, 7))}, id="stop tokens"),
    ],
)
@pytest.mark.parametrize("max_num_batched_tokens", [29, 64])
def test_answers_and_their_ends_with_a_head_are_those_without(
    trained: Zoo, steer: dict[str, Any], max_num_batched_tokens: int
) -> None:
    asked = [*TRAINED[:4], *some_requests(seed=3, count=5)]
    alone = events_of(trained.engine(), trained, asked, **steer)
    engine = mtp_engine(trained, seed=4, max_num_batched_tokens=max_num_batched_tokens)
    draft_what_follows(engine, {name: [event.token_id for event in told] for name, told in alone.items()})
    drafted = events_of(engine, trained, asked, **steer)
    for one in asked:
        told, expected = drafted[one.name], alone[one.name]
        assert [event.token_id for event in told] == [event.token_id for event in expected]
        assert [event.finish_reason for event in told] == [event.finish_reason for event in expected]
        assert [event.logprob for event in told] == pytest.approx([event.logprob for event in expected], abs=1e-3)
        assert told[-1].count.tokens.output == expected[-1].count.tokens.output
    assert engine.stats().accepted_tokens > 0
    assert engine.stats().pages_kv == 0


PATTERNS = ["[0-9]{12}", "(ab|cd){8}", None, '[{]"a": [0-9]{1,9}, "b": (true|false)[}]']


def test_constrained_answers_with_a_head_are_those_without(tmp_path: Path) -> None:
    """The masks of drafted rows are those of their places, and a draft that a grammar forbids is refused."""
    zoo = Zoo("qwen3_5", tmp_path, vocab_size=260, eos_token_id=256)
    byte_tokenizer().save_pretrained(zoo.base)
    asked = []
    for i, pattern in enumerate(PATTERNS):
        grammar = None if pattern is None else LLMatcher.grammar_from_regex(pattern)
        made = Request(
            id=f"r{i}",
            tenant="t",
            prompt_token_ids=list(b"answer %d: " % i),
            sampling=SamplingParams(max_tokens=30, temperature=0.8, seed=i),
            constraint=None if grammar is None else Constraint(grammar=grammar, field="f"),
        )
        asked.append(made)

    def run(engine: Engine) -> dict[str, list[int | None]]:
        told: dict[str, list[int | None]] = {one.id: [] for one in asked}
        for one in asked:
            engine.submit(one)
        while not engine.is_idle:
            report = engine.step()
            for event in report.events if report else []:
                told[event.request_id].append(event.token_id)
        return told

    alone = run(zoo.engine())
    model = base_of(zoo.base)
    head = ReferenceHead.random(model)
    texts = [[*one.prompt_token_ids, *(token or 0 for token in alone[one.id])] for one in asked]
    train(head, model, texts, steps=120)
    head.save(zoo.base)
    engine = preempting(mtp_engine(zoo), every=6)
    assert run(engine) == alone
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.preemptions > 0


def rewrite(base: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = base / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def is_of_head(base: Path, name: str) -> bool:
    layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
    return name.startswith(("mtp.", "model.mtp_", f"model.layers.{layers}."))


def without_head(base: Path) -> None:
    rewrite(base, lambda tensors: {name: one for name, one in tensors.items() if not is_of_head(base, name)})


def with_scales(base: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        linear = next(name for name in tensors if is_of_head(base, name) and name.endswith("o_proj.weight"))
        return tensors | {f"{linear}_scale": torch.ones(1)}

    rewrite(base, add)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_head, r"has no weights of a head for multi-token prediction \((mtp|model\.layers\.3)\.\*\)"),
        (with_scales, r"other weights than this family's \(layers\.0\.self_attn\.o_proj\.weight_scale\): heads of"),
    ],
)
def test_checkpoint_without_a_servable_head_is_refused_with_the_way_out(
    trained: Zoo, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    shutil.copytree(trained.base, tmp_path / "base")
    change(tmp_path / "base")
    with pytest.raises(UnsupportedModel, match=message) as refused:
        make_engine(tmp_path / "base", speculation="mtp")
    assert str(refused.value).startswith('engine.speculation = "mtp", and ')
    assert str(refused.value).endswith('set engine.speculation to "ngram" or "off".')
    make_engine(tmp_path / "base", speculation="ngram").close()


def test_families_and_ranks_without_a_head_are_refused_with_the_way_out(trained: Zoo, zoo_of) -> None:
    with pytest.raises(UnsupportedModel, match=r"serves no head for multi-token prediction of llama, or set engine"):
        zoo_of("llama").engine(speculation="mtp")
    with pytest.raises(UnsupportedModel, match=r"engine.tensor_parallel_size = 1 serves it"):
        trained.engine(speculation="mtp", tensor_parallel_size=2)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_pages_weights_and_the_plan_before_loading_count_the_head(trained: Zoo, kv_cache_dtype: str) -> None:
    heads: dict[str, tuple[MemoryPlan, int]] = {}
    chosen: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "block_size": 64, "linear_format": "torch"}
    for speculation in ("off", "mtp"):
        loaded, settings = load(trained.base, speculation=speculation, **chosen)
        config = read_config(trained.base)
        plan = plan_memory(trained.base, describe_base(trained.base), Sharding(config, 1), 4, 4 << 20, settings.engine)
        assert plan.page_bytes == loaded.runner.bank.page_bytes
        heads[speculation] = plan, loaded.weight_bytes, loaded.weights.packed_bytes
    (without, weights, packed), (plan, with_weights, with_packed) = heads["off"], heads["mtp"]
    width = 1 if kv_cache_dtype == "fp8" else 4
    token = 48 + 8 if trained.family == "deepseek_v3" else 2 * 2 * 24
    assert plan.page_bytes - without.page_bytes == pytest.approx(64 * token * width + 64 * 4, abs=32)
    own = sum(weight.numel() for weight in ReferenceHead.read(base_of(trained.base), trained.base).weights.values())
    assert plan.weight_bytes - without.weight_bytes == 4 * own
    assert with_weights - weights == pytest.approx(4 * own, abs=64)
    assert with_packed - packed == with_weights - weights, "the pool of a GPU leaves room for the head"


def test_head_in_fp8_pages_drafts_and_changes_no_answer(trained: Zoo) -> None:
    answers = serve(trained, trained.engine(kv_cache_dtype="fp8", block_size=64), TRAINED)
    engine = mtp_engine(trained, kv_cache_dtype="fp8", block_size=64)
    got = serve(trained, engine, TRAINED)
    same = sum(got[name] == answers[name] for name in answers)
    assert same >= len(answers) - 1  # a page's scale is that of its first token, whose rounding a step's rows change
    assert engine.stats().accepted_tokens > 0


def test_head_drafts_under_the_measured_rule_and_only_when_it_pays(trained: Zoo) -> None:
    """Real decisions: on a device on which a row costs nothing, and on one on which it costs as much as a step."""
    drafted = []
    for row_seconds in (0.0, 1.0):
        engine = trained.engine(speculation="mtp", max_draft_tokens=4)
        times = SimpleNamespace(
            is_known=True, observe=lambda *_: None, is_measured=lambda rows: True, ahead_seconds=0.0
        )
        times.seconds = lambda rows, each=row_seconds: 1.0 + each * rows
        engine.scheduler.speculation.times = cast(Any, times)
        assert serve(trained, engine, TRAINED[:2]) == {one.name: trained.answer(one) for one in TRAINED[:2]}
        drafted.append(engine.stats().drafted_tokens)
    assert drafted[0] > 0 == drafted[1]

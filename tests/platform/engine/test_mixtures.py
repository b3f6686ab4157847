"""Mixtures of experts: bases, and adapters on their experts and routers, token for token with PEFT."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_zoo import HYBRIDS, NEWER_MIXTURES, NOT_FOR_PEFT, ON_RANKS, WHOLE_HYBRIDS, Asked, Zoo, load, serve
from formats import FormatZoo
from preempting import preempting

from loramux.catalog.validation.validator import Validator
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import ModelSettings
from loramux.engine.execution.cuda_graphs import host_syncs_of
from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.base import describe_base
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.experts import ExpertLinear, ExpertRouter, ExpertRuns, Experts
from loramux_adapters.plan import CONFIG_NAME, PlanLimits, validate_adapter
from loramux_kernels.mixture import route
from loramux_kernels.tables import Segments

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FIRST = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
LORA = {"lora_alpha": 10, "task_type": "CAUSAL_LM"}

RECIPES: dict[str, peft.LoraConfig] = {
    "attention": peft.LoraConfig(r=5, target_modules=["q_proj", "o_proj"], **LORA),
    "all-linear": peft.LoraConfig(r=4, target_modules="all-linear", **LORA),
    "experts": peft.LoraConfig(r=3, target_modules=[], target_parameters=EXPERTS, **LORA),
    "patterns": peft.LoraConfig(
        r=3,
        target_modules=["v_proj"],
        target_parameters=EXPERTS,
        rank_pattern={"down_proj": 18},
        alpha_pattern={"gate_up_proj": 4},
        use_rslora=True,
        **LORA,
    ),
    "down": peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"], **LORA),
    "one layer": peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["model.layers.2.mlp.experts.gate_up_proj"], **LORA
    ),
}


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    made = FormatZoo(request.param, tmp_path_factory.mktemp(request.param), [])
    for seed, (name, config) in enumerate(RECIPES.items()):
        made.make_format(name, peft.LoraConfig(**{k: v for k, v in config.to_dict().items() if k in KEPT}), seed)
    return made


KEPT = set(peft.LoraConfig.__dataclass_fields__) - {"peft_type", "runtime_config"}


def some_requests() -> list[Asked]:
    rng = random.Random(3)
    names = [None, *RECIPES]
    return [
        Asked(f"r{i}", names[i % len(names)], tuple(rng.randrange(3, 97) for _ in range(rng.choice([1, 5, 17, 30]))), 8)
        for i in range(2 * len(names))
    ]


@ON_RANKS
def test_mixture_adapters_and_base_in_one_batch_answer_as_peft_does(zoo: FormatZoo, ranks: int) -> None:
    asked = some_requests()
    engine = zoo.engine(max_num_batched_tokens=29, tensor_parallel_size=ranks)
    got = serve(zoo, engine, asked, arrivals=[i // 3 for i in range(len(asked))])
    for request in asked:
        assert got[request.name] == zoo.answer(request), request
    assert engine.stats().max_distinct_adapters_beside_base >= 2
    engine.close()


def test_mixture_every_adapter_alone_answers_as_peft_does_and_unlike_the_base(zoo: FormatZoo) -> None:
    prompt = tuple(range(5, 25))
    base = zoo.answer(Asked("base", None, prompt, 10))
    for name in RECIPES:
        asked = Asked("alone", name, prompt, 10)
        assert serve(zoo, zoo.engine(), [asked])["alone"] == zoo.answer(asked), name
        assert zoo.answer(asked) != base, name


NEWER_RECIPES = {
    "linears": {"r": 5, "target_modules": "all-linear"},
    "experts": {
        "r": 3,
        "target_modules": [],
        "target_parameters": ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"],
    },
    "router": {
        "r": 2,
        "target_modules": ["o_proj"],
        "target_parameters": ["gate.weight", "router.weight", "experts.down_proj"],
        "rank_pattern": {"down_proj": 17},
    },
}


@ON_RANKS
@pytest.mark.parametrize("family", [*NEWER_MIXTURES, "qwen3_next", "granitemoehybrid", "nemotron_h", "lfm2_moe"])
def test_newer_mixture_adapters_and_base_in_one_batch_answer_as_peft_does(
    tmp_path: Path, family: str, ranks: int
) -> None:
    if ranks > 1 and family in WHOLE_HYBRIDS:
        pytest.skip("one rank serves it")
    made = FormatZoo(family, tmp_path, [])
    known = describe_base(made.base).parameters
    for seed, (name, recipe) in enumerate(NEWER_RECIPES.items()):
        fields = dict(recipe, exclude_modules=NOT_FOR_PEFT.get(family))
        if name == "linears" and family == "phimoe":  # PEFT itself fails on its router, which is no plain nn.Linear
            fields["target_modules"] = ["q_proj", "k_proj", "o_proj"]
        if name == "router" and family == "lfm2_moe":
            fields["target_modules"] = ["out_proj"]
        if "target_parameters" in recipe:  # each base has one of the routers
            ends = (end for end in recipe["target_parameters"] if any(n.endswith(f".{end}") for n in known))
            fields["target_parameters"] = list(ends)
        made.make_format(name, peft.LoraConfig(**LORA | fields), seed)
    names = [None, *NEWER_RECIPES]
    rng = random.Random(5)
    asked = [
        Asked(f"r{i}", names[i % 4], tuple(rng.randrange(3, 97) for _ in range(length)), 6)
        for i, length in enumerate((1, 5, 17, 33, 20, 3))
    ]
    assert len({tuple(made.answer(Asked("x", name, (5, 6, 7, 8), 8))) for name in names}) == len(names)
    engine = preempting(made.engine(max_num_batched_tokens=29, tensor_parallel_size=ranks))
    for _ in range(2):
        got = serve(made, engine, asked, arrivals=[i // 5 for i in range(len(asked))])
        for request in asked:
            assert got[request.name] == made.answer(request), request
    stats = engine.stats()
    assert stats.max_distinct_adapters_beside_base >= 2
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0 or family in HYBRIDS, "a page of states may be longer than these prompts"
    engine.close()


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral", "phimoe"])
def test_mixture_router_computes_logits_in_the_familys_own_dtype(tmp_path: Path, family: str) -> None:
    """A logit that is rounded to bfloat16 on its way chooses other experts than transformers does."""
    base = Zoo(family, tmp_path).base
    wanted = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    attribute = "router" if family in ("gpt_oss", "phimoe") else "gate"
    torch.manual_seed(2)
    x = torch.randn(40, 64).bfloat16()
    loaded, _ = load(base, dtype="bfloat16")
    modules = loaded.runner._forward.model.get_decoder().named_modules()
    served = next(module for name, module in modules if name.endswith("layers.1.mlp"))
    served = getattr(getattr(served, "network", served), attribute)
    exact = getattr(wanted.get_decoder().layers[1].mlp, attribute)
    with torch.inference_mode():
        got, expected = served(x), exact(x)
    assert got[0].dtype == expected[0].dtype
    torch.testing.assert_close(got[0], expected[0])
    assert torch.equal(got[2], expected[2])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["logits first", "logits last"])
def test_mixture_router_finds_its_dtype_wherever_logits_stand(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Granite's routers return them last up to transformers 5.17: the dtype of chosen experts would cut the weight."""
    gate = transformers.AutoModelForCausalLM.from_pretrained(Zoo("mixtral", tmp_path).base).model.layers[0].mlp.gate
    wanted = gate(x := torch.randn(9, 64))
    forward = gate.forward
    gate.forward = lambda hidden: tuple(forward(hidden)[place] for place in order)
    bank = AdapterBank(torch.empty(64), 64, {}, max_rank=1, max_slots=1)
    got = ExpertRouter(gate, Site(0, 64, len(gate.weight)), bank)(x)
    for place, part in zip(order, got, strict=True):
        torch.testing.assert_close(part, wanted[place])


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.1 * i for i in range(8)],
    "short_mscale": 1.2,
    "long_mscale": 1.4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("fields", [{}, {"rope_parameters": LONG_ROPE}], ids=["default", "longrope"])
def test_phimoe_asks_neither_the_host_nor_the_batch_for_its_rotary_factors(tmp_path: Path, fields) -> None:
    zoo = FormatZoo("phimoe", tmp_path, (), **fields)
    engine = zoo.engine(max_model_len=64)
    rotary = engine._runner._forward.model.get_decoder().rotary_emb
    assert rotary.rope_init_fn(rotary.config)[0] is rotary.inv_freq
    assert host_syncs_of(lambda: rotary(torch.zeros(1, 3, 64), torch.arange(3)[None])) == set()
    asked = [Asked("long", None, tuple(range(5, 35)), 9), Asked("short", None, (5, 6, 7), 5)]
    got = serve(zoo, engine, asked)
    assert got == {request.name: zoo.answer(request) for request in asked}


REFUSED: dict[str, tuple[dict[str, object], str, str]] = {
    "no expert's": ({"target_parameters": ["q_proj.weight"]}, "target_unsupported", "target_parameters"),
    "no targets at all": ({"target_parameters": []}, "config_invalid", "target_modules"),
    "DoRA": ({"target_parameters": EXPERTS, "use_dora": True}, "config_invalid", "use_dora"),
    "lora_bias": ({"target_parameters": EXPERTS, "lora_bias": True}, "config_invalid", "lora_bias"),
    "activated": (
        {"target_parameters": EXPERTS, "alora_invocation_tokens": [7]},
        "field_unsupported",
        "target_parameters",
    ),
    "a linear of transformers 4": ({"target_modules": ["w1"]}, "no_module_matched", "target_modules"),
    "another rank": ({"target_parameters": EXPERTS, "r": 4}, "shape_mismatch", FIRST),
    "one parameter only": (
        {"target_parameters": EXPERTS[:1]},
        "tensors_unexpected",
        FIRST,
    ),
    "too large": ({"target_parameters": EXPERTS, "r": 65}, "rank_too_large", "r"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mixture_adapter_that_does_not_fit_is_refused_by_its_field(zoo: FormatZoo, case: str, tmp_path: Path) -> None:
    fields, code, field = REFUSED[case]
    shutil.copytree(zoo.adapters / "experts", tmp_path, dirs_exist_ok=True)
    document = json.loads((tmp_path / CONFIG_NAME).read_text())
    (tmp_path / CONFIG_NAME).write_text(json.dumps(document | fields))
    with pytest.raises(AdapterRejected) as caught:
        validate_adapter(tmp_path, describe_base(zoo.base), PlanLimits(max_rank=64))
    assert (caught.value.code, caught.value.field) == (code, field)


@pytest.mark.slow
def test_mixture_adapter_of_experts_passes_the_parity_check(zoo: FormatZoo, tmp_path: Path) -> None:
    shutil.copytree(zoo.adapters / "all-linear", tmp_path / "upload")
    settings = Settings(model=ModelSettings(path=str(zoo.base), served_model_name="base"))
    with closing(Validator(settings, describe_base(zoo.base), "float32")) as validator:
        report = validator.examine(tmp_path / "upload", PlanLimits(max_rank=64))
    assert report.refusal is None
    assert {check.name: check.outcome for check in report.checks}["parity_of_tokens"] == "passed"
    assert report.found is not None
    assert {"q_proj", "weight", "gate_up_proj", "down_proj"} <= report.found.targets.keys()


def test_mixture_rows_are_grouped_by_expert_and_adapter() -> None:
    """Three tokens of slot 7, one of slot 2, one of the base's, two experts each."""
    routes = route(torch.tensor([[0, 2], [2, 0], [0, 3], [3, 0], [2, 0]]), num_experts=4)
    assert routes.starts.tolist() == [0, 5, 5, 8, 10]
    assert routes.tokens.tolist() == [0, 1, 2, 3, 4, 0, 1, 4, 2, 3]
    runs = ExpertRuns.of(routes, Segments((0, 3, 4), (7, 2)))
    assert runs.rows.tolist() == [0, 1, 2, 3, 5, 6, 8, 9]
    assert list(zip(runs.experts, runs.slots, strict=True)) == [(0, 7), (0, 2), (2, 7), (3, 7), (3, 2)]
    assert runs.cu_seqlens == (0, 3, 4, 6, 7, 8)


def test_mixture_steps_are_not_recorded_as_graphs() -> None:
    bank: Any = SimpleNamespace(sites={}, segments=None)
    gate_up, down = (ExpertLinear(torch.ones(4, 2, 2), None, [Site(0, 2, 2)], bank) for _ in range(2))
    experts = Experts(gate_up, down, torch.relu, bank)
    assert host_syncs_of(lambda: experts(torch.ones(1, 2), torch.tensor([[0, 2]]), torch.ones(1, 2))) == {"tolist"}

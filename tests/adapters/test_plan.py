"""The plan, compared with PEFT: for any configuration it has exactly PEFT's tensors, with PEFT's scales."""

from __future__ import annotations

import json
import warnings
from typing import Any

import peft
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft.utils.save_and_load import get_peft_model_state_dict
from tiny_peft import FAMILIES, tiny_model

from loramux_adapters.components import AdapterPlan
from loramux_adapters.config import parse_adapter_config
from loramux_adapters.errors import AdapterRejected, BaseMismatch, ConfigRejected, WeightsFileRejected
from loramux_adapters.plan import PlanLimits, plan_adapter
from loramux_adapters.weights_file import SafetensorsHeader, TensorInfo

LIMITS = PlanLimits(max_rank=64, max_bytes=1 << 20)
SERVED = [family for family in FAMILIES if family != "gpt2"]

RECIPES: dict[str, dict[str, Any]] = {
    "list": {"target_modules": ["o_proj", "down_proj", "c_attn"]},
    "fused": {"target_modules": ["qkv_proj", "gate_up_proj", "q_proj", "up_proj", "c_fc"]},
    "all_linear": {"target_modules": "all-linear"},
    "all_but_one": {"target_modules": "all-linear", "exclude_modules": ["o_proj", "model.layers.1.mlp.down_proj"]},
    "all_but_some": {"target_modules": "all-linear", "exclude_modules": r".*\.mlp\.[cdg].*"},
    "regex": {"target_modules": r".*\.1\..*(o_proj|down_proj|c_proj)"},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 11},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"^model.layers.1.mlp.down_proj": 2, r"layers\.0\..*": 5, "c_proj": 3},
        "alpha_pattern": {"o_proj": 32, r".*\.h\.1\.mlp.*": 1, "^o_proj": 7},
    },
    "one_layer": {"target_modules": ["o_proj", "c_attn", "down_proj"], "layers_to_transform": 1},
    "layers": {
        "target_modules": ["o_proj", "c_attn", "model.layers.0.mlp.down_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["h", "layers"],
    },
    "conv1d": {"target_modules": ["o_proj", "c_fc"], "fan_in_fan_out": True},
}


def documents(config: peft.LoraConfig) -> bytes:
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return json.dumps(fields).encode()


def header_of(shapes: dict[str, tuple[int, ...]], file_bytes: int = 100) -> SafetensorsHeader:
    return SafetensorsHeader({key: TensorInfo("F32", shape, 0, 0) for key, shape in shapes.items()}, {}, file_bytes)


class Injected:
    """Apply a configuration with PEFT to a tiny model without weights."""

    def __init__(self, family: str, fields: dict[str, Any]) -> None:
        config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16} | fields)
        self.written = documents(config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = peft.get_peft_model(tiny_model(family, "meta"), config)
            state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        self.saved = documents(self.model.peft_config["default"])
        self.shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
        self.modules = {
            name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
            for name, module in self.model.named_modules()
            if isinstance(module, peft.tuners.lora.LoraLayer)
        }


def as_peft(plan: AdapterPlan) -> tuple[dict[str, tuple[int, float]], dict[str, tuple[int, ...]]]:
    modules = {pair.module: (pair.rank, pair.scale) for pair in plan.pairs}
    return modules, {key: shape for pair in plan.pairs for key, shape in pair.shapes.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_every_format_on_every_family_equals_pefts_file(recipe: str, family: str, base_of) -> None:
    injected = Injected(family, RECIPES[recipe])
    for document in (injected.written, injected.saved):
        plan = plan_adapter(parse_adapter_config(document), header_of(injected.shapes), base_of(family), LIMITS)
        assert as_peft(plan) == (injected.modules, injected.shapes)
        assert plan.max_rank == max(rank for rank, _ in injected.modules.values())


targets = st.one_of(
    st.lists(
        st.sampled_from(
            [
                *("q_proj", "k_proj", "o_proj", "down_proj", "qkv_proj", "c_attn", "c_proj", "self_attn.q_proj"),
                *("model.layers.1.mlp.up_proj", "1.self_attn.v_proj", "transformer.h.0.mlp.c_fc", "proj", "nothing"),
                *("mlp", "lm_head", "embed_tokens", "wte", "norm", "model.layers.0", "layers"),
            ]
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(
        [
            *("all-linear", "ALL-LINEAR", "dummy-target-modules", "q_proj", r".*\.(q|v)_proj", r".*(q_proj|k_proj)$"),
            *(
                r"model\.layers\.[01]\.mlp\..*_proj",
                r"(?!.*lm_head).*_proj",
                r".*\.h\.0\..*c_.*",
                ".*proj|lm_head",
                ".*",
            ),
        ]
    ),
)
keys = st.sampled_from(
    [
        *(
            "q_proj",
            "^q_proj",
            "down",
            "down_proj",
            "layers.0.*",
            r".*\.self_attn\..*",
            "model.layers.0.self_attn.q_proj",
        ),
        *(
            "^model.layers.1.mlp.down_proj",
            r"layers\.\d+\.mlp\.(up|down)_proj",
            "^.*q_proj",
            "c_attn|c_proj",
            "mlp.c_proj",
        ),
    ]
)
configurations = st.fixed_dictionaries(
    {"target_modules": targets, "r": st.integers(1, 20), "lora_alpha": st.integers(1, 40)},
    optional={
        "use_rslora": st.booleans(),
        "fan_in_fan_out": st.booleans(),
        "rank_pattern": st.dictionaries(keys, st.integers(1, 30), max_size=3),
        "alpha_pattern": st.dictionaries(keys, st.integers(1, 30), max_size=3),
        "exclude_modules": st.lists(
            st.sampled_from(["q_proj", "mlp.down_proj", "layers.1", "h.0.attn.c_attn"]), max_size=2
        )
        | st.sampled_from([r".*\.0\..*", "lm_head"]),
        "layers_to_transform": st.lists(st.integers(0, 2), max_size=2) | st.integers(0, 1),
        "layers_pattern": st.sampled_from(["layers", "h", ["h", "layers"], "blocks", None]),
    },
)


@settings(max_examples=150, deadline=None)
@given(family=st.sampled_from(["llama", "llama_tied", "phi3", "gpt2"]), fields=configurations)
@example(family="llama", fields={"target_modules": ["lm_head", "q_proj"], "r": 4, "lora_alpha": 4})
@example(family="llama_tied", fields={"target_modules": ["embed_tokens"], "r": 4, "lora_alpha": 4})
def test_plan_any_configuration_equals_pefts_or_is_refused(family: str, fields: Any, base_of) -> None:
    try:
        injected = Injected(family, fields)
    except (ValueError, TypeError, AttributeError):  # what PEFT itself cannot inject
        injected = None
    base = base_of(family)
    served = {*base.modules, base.vocabulary.embedding, base.vocabulary.head}
    if injected is None or not injected.modules or not set(injected.modules) <= served:
        document = json.dumps({"peft_type": "LORA"} | fields).encode()
        with pytest.raises(AdapterRejected):
            plan_adapter(parse_adapter_config(document), header_of({}), base_of(family), LIMITS)
        return
    for document in (injected.written, injected.saved):
        plan = plan_adapter(parse_adapter_config(document), header_of(injected.shapes), base_of(family), LIMITS)
        assert as_peft(plan) == (injected.modules, injected.shapes)


# ---- refusals


def refuse(fields: dict[str, Any], base: Any, shapes: dict[str, tuple[int, ...]] | None = None) -> AdapterRejected:
    document = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]} | fields
    with pytest.raises(AdapterRejected) as caught:
        plan_adapter(parse_adapter_config(json.dumps(document).encode()), header_of(shapes or {}), base, LIMITS)
    return caught.value


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("self_attn", "a LlamaAttention"),
        ("model.layers.0", "a LlamaDecoderLayer"),
        ("input_layernorm", "a LlamaRMSNorm"),
    ],
)
def test_plan_unsupported_target_is_refused_by_name(target: str, reason: str, llama) -> None:
    for target_modules in (["q_proj", target], rf".*q_proj|(.*\.)?{target}"):
        refusal = refuse({"target_modules": target_modules}, llama)
        assert isinstance(refusal, ConfigRejected)
        assert (refusal.code, refusal.field) == ("target_unsupported", "target_modules")
        assert target in refusal.message
        assert reason in refusal.message


def test_plan_targets_without_a_match_list_the_bases_linears(base_of) -> None:
    refusal = refuse({"target_modules": ["query_key_value"]}, base_of("phi3"))
    assert isinstance(refusal, BaseMismatch)
    assert (refusal.code, refusal.field) == ("no_module_matched", "target_modules")
    assert all(word in refusal.message for word in ("query_key_value", "Phi3ForCausalLM", "qkv_proj", "hidden size 64"))


@pytest.mark.parametrize(("fields", "field"), [({"r": 65}, "r"), ({"rank_pattern": {"q_proj": 65}}, "rank_pattern")])
def test_plan_rank_above_the_limit_is_refused(fields: dict[str, Any], field: str, llama) -> None:
    refusal = refuse(fields, llama)
    assert (refusal.code, refusal.field) == ("rank_too_large", field)
    assert "65" in refusal.message
    assert "64" in refusal.message


def test_plan_file_above_the_limit_is_refused(llama) -> None:
    config = parse_adapter_config(b'{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}')
    with pytest.raises(WeightsFileRejected) as caught:
        plan_adapter(config, header_of({}, LIMITS.max_bytes + 1), llama, LIMITS)
    assert caught.value.code == "weights_too_large"


def on_llama() -> dict[str, tuple[int, ...]]:
    return Injected("llama", {"target_modules": ["q_proj"]}).shapes


def test_plan_missing_tensors_are_named_and_counted(llama) -> None:
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    shapes = on_llama()
    del shapes[key]
    refusal = refuse({}, llama, shapes)
    assert (refusal.code, refusal.field) == ("tensors_missing", key)
    assert "1 of the 4 tensors" in refusal.message
    empty = refuse({"target_modules": ["k_proj"]}, llama, {})
    assert (empty.code, "holds no tensor at all" in empty.message) == ("tensors_missing", True)
    assert "holds no tensor" not in refusal.message


def test_plan_targets_without_any_tensor_are_absent(llama) -> None:
    fields = {"target_modules": ["q_proj", "k_proj"], "lora_bias": True}
    injected = Injected("llama", fields)
    shapes = injected.shapes
    absent = ("model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.q_proj")
    kept = {key: shape for key, shape in shapes.items() if not any(f".{module}." in key for module in absent)}
    plan = plan_adapter(parse_adapter_config(injected.written), header_of(kept), llama, LIMITS)
    assert plan.shapes == kept
    assert plan.absent == absent
    assert {part.module for part in plan.components}.isdisjoint(absent)


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias",
        "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",
        "base_model.model.lm_head.bias",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "evil",
    ],
)
def test_plan_unexpected_tensors_are_named_and_counted(key: str, llama) -> None:
    refusal = refuse({}, llama, on_llama() | {key: (8, 64)})
    assert (refusal.code, refusal.field) == ("tensors_unexpected", key)
    assert key in refusal.message
    assert "1 tensors" in refusal.message


@pytest.mark.parametrize("shape", [(7, 64), (8, 63), (64, 8), (8,), (8, 64, 1), ()])
def test_plan_wrong_shapes_are_named_with_the_right_ones(shape: tuple[int, ...], llama) -> None:
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    refusal = refuse({"base_model_name_or_path": "acme/other-7b"}, llama, on_llama() | {key: shape})
    assert (refusal.code, refusal.field) == ("shape_mismatch", key)
    assert all(part in refusal.message for part in (str(list(shape)), "[8, 64]", "acme/other-7b", "LlamaForCausalLM"))


@pytest.mark.parametrize("shape", [(0,), (0, 64)])
def test_plan_empty_tensors_are_refused_with_zero3s_way_out(shape: tuple[int, ...], llama) -> None:
    """DeepSpeed ZeRO-3 holds every parameter as `[0]` outside of a step, and PEFT saves what it finds."""
    refusal = refuse({}, llama, {key: shape for key in on_llama()})
    assert refusal.code == "shape_mismatch"
    assert "stage3_gather_16bit_weights_on_model_save" in refusal.message
    assert "ZeRO-3" not in refuse({}, llama, {key: (7, 63) for key in on_llama()}).message


def test_plan_adapter_of_a_larger_model_is_refused(llama) -> None:
    shapes = {key.replace("layers.1.", "layers.31."): shape for key, shape in on_llama().items()} | on_llama()
    assert refuse({}, llama, shapes).code == "tensors_unexpected"


@pytest.mark.parametrize("family", SERVED)
def test_plan_adapter_of_another_architecture_is_refused(family: str, base_of) -> None:
    refusal = refuse(
        {"target_modules": ["c_attn"]}, base_of(family), Injected("gpt2", {"target_modules": ["c_attn"]}).shapes
    )
    assert refusal.code == "no_module_matched"

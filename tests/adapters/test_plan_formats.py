"""Plans of formats other than plain LoRA, compared with PEFT itself, and refusals of formats by field."""

from __future__ import annotations

import copy
import json
import warnings
from typing import Any

import peft
import pytest
from formats import FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.save_and_load import get_peft_model_state_dict
from tiny_peft import tiny_model

from loramux_adapters.base import BaseDescription
from loramux_adapters.components import AdapterPlan
from loramux_adapters.config import parse_adapter_config
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import PlanLimits, plan_adapter
from loramux_adapters.weights_file import SafetensorsHeader, TensorInfo

LIMITS = PlanLimits(max_rank=64, max_bytes=1 << 20, max_vocabulary_bytes=40_000)
Shapes = dict[str, tuple[int, ...]]


def written(config: peft.PeftConfig) -> bytes:
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return json.dumps(fields).encode()


def header_of(shapes: Shapes) -> SafetensorsHeader:
    return SafetensorsHeader({key: TensorInfo("F32", shape, 0, 0) for key, shape in shapes.items()}, {}, 100)


def injected(family: str, config: peft.PeftConfig, save_embedding_layers: bool) -> Shapes:
    """Return what PEFT saves of an adapter on a tiny model without weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(tiny_model(family, "meta"), copy.deepcopy(config))
        state = get_peft_model_state_dict(model, save_embedding_layers=save_embedding_layers)
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


TIED = {"tied_saved", "tied_head", "tied_pair", "tied_expression"}
"""Formats whose matrix or pair PEFT writes in two places if the base is tied."""


def tied_again(plan: AdapterPlan) -> set[str]:
    """The tensors of the head that PEFT writes once more, because they are the embedding's."""
    of_copies = (".modules_to_save.weight", ".trainable_tokens_delta")
    return {repeat.key for repeat in plan.repeats if not repeat.key.endswith(of_copies)}


def planned(plan: AdapterPlan, *, with_copies: bool = False) -> Shapes:
    """Return what PEFT writes by the plan: exactly its tensors and those of a tied head.

    With copies also the base's matrices, and every tensor under the name of its module once more; if one of the
    matrices is a target, PEFT writes only the targets' matrices.
    """
    optional = plan.optional_shapes
    if not with_copies:
        return plan.shapes | {key: optional[key] for key in tied_again(plan)}
    targets = [copy for copy in plan.copies if any(_of_target(key) for key in copy.shapes)]
    left_out = {key for copy in plan.copies if targets and copy not in targets for key in copy.shapes}
    return plan.shapes | {key: shape for key, shape in optional.items() if key not in left_out}


def _of_target(key: str) -> bool:
    return key.endswith(".base_layer.weight") and ".token_adapter." not in key


@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "phi3", "gemma3"])
@pytest.mark.parametrize("name", FORMATS)
def test_plan_every_format_on_every_family_equals_pefts_file(name: str, family: str, base_of) -> None:
    config, base = FORMATS[name], base_of(family)
    shapes = injected(family, config, save_embedding_layers=False)
    plan = plan_adapter(parse_adapter_config(written(config)), header_of(shapes), base, LIMITS)
    assert planned(plan) == shapes
    assert bool(tied_again(plan)) == (base.vocabulary.tied and name in TIED)
    if plan.copies:
        with_copies = injected(family, config, save_embedding_layers=True)
        assert planned(plan, with_copies=True) == with_copies
        assert plan_adapter(parse_adapter_config(written(config)), header_of(with_copies), base, LIMITS) == plan


configurations = st.fixed_dictionaries(
    {
        "target_modules": st.lists(
            st.sampled_from(["q_proj", "down_proj", "lm_head", "embed_tokens"]), min_size=1, max_size=4, unique=True
        )
    },
    optional={
        "use_dora": st.booleans(),
        "lora_bias": st.booleans(),
        "modules_to_save": st.lists(st.sampled_from(["lm_head", "embed_tokens", "head", "score"]), max_size=2),
        "trainable_token_indices": st.lists(st.integers(0, 96), min_size=1, max_size=3, unique=True)
        | st.dictionaries(st.sampled_from(["embed_tokens", "lm_head"]), st.just([5, 3]), min_size=1),
        "rank_pattern": st.dictionaries(st.sampled_from(["lm_head", "embed_tokens"]), st.integers(1, 20)),
        "ensure_weight_tying": st.booleans(),
    },
)


@settings(max_examples=60, deadline=None)
@given(family=st.sampled_from(["llama", "llama_tied"]), fields=configurations)
def test_plan_any_format_equals_what_peft_saves(family: str, fields: dict[str, Any], base_of) -> None:
    """Refusals are tested below one by one; here no plan may differ from what PEFT saves."""
    try:
        config = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
        shapes = injected(family, config, save_embedding_layers=False)
    except (ValueError, AttributeError, KeyError, TypeError, RuntimeError):
        return
    found = shapes_or_code(config, shapes, base_of(family))
    assert found in (shapes, "config_invalid", "field_unsupported", "target_unsupported")


def shapes_or_code(config: peft.PeftConfig, shapes: Shapes, base: BaseDescription) -> Shapes | str:
    try:
        return planned(plan_adapter(parse_adapter_config(written(config)), header_of(shapes), base, LIMITS))
    except AdapterRejected as refusal:
        return refusal.code


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
IA3 = {"peft_type": "IA3", "target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a whole block saved": (LORA | {"modules_to_save": ["mlp"]}, "target_unsupported", "modules_to_save"),
    "a linear saved whole": (LORA | {"modules_to_save": ["o_proj"]}, "target_unsupported", "modules_to_save"),
    "saved and targeted": (
        LORA | {"target_modules": ["lm_head"], "modules_to_save": ["lm_head"]},
        "config_invalid",
        "modules_to_save",
    ),
    "saved and by token": (
        LORA | {"trainable_token_indices": [3], "modules_to_save": ["embed_tokens"]},
        "config_invalid",
        "trainable_token_indices",
    ),
    "a token twice": (LORA | {"trainable_token_indices": [3, 3]}, "config_invalid", "trainable_token_indices"),
    "a token far away": (LORA | {"trainable_token_indices": [2000000000]}, "config_invalid", "trainable_token_indices"),
    "a negative token": (LORA | {"trainable_token_indices": [-1]}, "config_invalid", "trainable_token_indices"),
    "tokens of a linear": (
        LORA | {"trainable_token_indices": {"o_proj": [3]}},
        "target_unsupported",
        "trainable_token_indices",
    ),
    "tokens of one module by two names": (
        LORA | {"trainable_token_indices": {"embed_tokens": [3], "model.embed_tokens": [4]}},
        "config_invalid",
        "trainable_token_indices",
    ),
    "no token": (
        LORA | {"trainable_token_indices": {"embed_tokens": []}},
        "config_invalid",
        "trainable_token_indices",
    ),
    "DoRA and bias": (LORA | {"use_dora": True, "lora_bias": True}, "config_invalid", "lora_bias"),
    "DoRA of the embedding": (
        LORA | {"use_dora": True, "target_modules": ["embed_tokens"]},
        "field_unsupported",
        "use_dora",
    ),
    "a bias on the embedding": (
        LORA | {"lora_bias": True, "target_modules": ["embed_tokens"]},
        "field_unsupported",
        "lora_bias",
    ),
    "activated on the head": (
        LORA | {"alora_invocation_tokens": [3], "target_modules": ["lm_head"]},
        "field_unsupported",
        "alora_invocation_tokens",
    ),
    "IA3 on an input that three share": (
        IA3 | {"feedforward_modules": ["q_proj"]},
        "target_unsupported",
        "feedforward_modules",
    ),
    "IA3 on the head's input": (
        IA3 | {"target_modules": ["lm_head"], "feedforward_modules": ["head"]},
        "target_unsupported",
        "feedforward_modules",
    ),
    "IA3 of an embedding": (IA3 | {"target_modules": ["embed_tokens"]}, "target_unsupported", "target_modules"),
    "IA3 of nothing": (IA3 | {"target_modules": ["nothing"]}, "no_module_matched", "target_modules"),
    "IA3 with layers": (IA3 | {"layers_to_transform": [1]}, "field_unknown", "layers_to_transform"),
    "IA3 with a slow expression": (
        IA3 | {"feedforward_modules": "(.+)+(.+)+(.+)+x!"},
        "pattern_too_slow",
        "feedforward_modules",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plan_unsupported_format_is_refused_by_field(name: str, llama) -> None:
    document, code, field = REFUSED[name]
    with pytest.raises(AdapterRejected) as caught:
        plan_adapter(parse_adapter_config(json.dumps(document).encode()), header_of({}), llama, LIMITS)
    assert (caught.value.code, caught.value.field) == (code, field), caught.value
    assert caught.value.message.endswith((".", "?"))


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        (
            {"trainable_token_indices": {"lm_head": [3], "embed_tokens": [4]}, "ensure_weight_tying": True},
            "config_invalid",
            "trainable_token_indices",
        ),
        (
            {"target_modules": ["lm_head", "q_proj"], "exclude_modules": ["embed_tokens"], "ensure_weight_tying": True},
            "config_invalid",
            "ensure_weight_tying",
        ),
        (
            {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            "config_invalid",
            "modules_to_save",
        ),
        (
            {"target_modules": ["embed_tokens"], "ensure_weight_tying": True, "use_dora": True},
            "field_unsupported",
            "use_dora",
        ),
    ],
)
def test_plan_on_a_tied_base_refuses_what_peft_cannot_tie(
    fields: dict[str, Any], code: str, field: str, base_of
) -> None:
    document = json.dumps(LORA | fields).encode()
    with pytest.raises(AdapterRejected) as caught:
        plan_adapter(parse_adapter_config(document), header_of({}), base_of("llama_tied"), LIMITS)
    assert (caught.value.code, caught.value.field) == (code, field)


def test_plan_vocabulary_tensors_have_a_quota(llama) -> None:
    config = FORMATS["saved"]
    shapes = injected("llama", config, save_embedding_layers=False)
    tensors = {}
    for key, shape in shapes.items():
        size = 4 * shape[0] * shape[-1]
        tensors[key] = TensorInfo("F32", shape, 0, size)
    document, header = parse_adapter_config(written(config)), SafetensorsHeader(tensors, {}, 100_000)
    needed = 2 * 97 * 64 * 4
    assert plan_adapter(document, header, llama, PlanLimits(max_vocabulary_bytes=needed)).rows
    with pytest.raises(AdapterRejected, match=str(needed)) as caught:
        plan_adapter(document, header, llama, PlanLimits(max_vocabulary_bytes=needed - 1))
    assert caught.value.code == "vocabulary_too_large"
    assert "adapters.max_vocabulary_bytes" in caught.value.message

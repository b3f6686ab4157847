"""adapter_config.json: every field of PEFT's is read, known to be harmless, or refused by name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import peft
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux_adapters.config import (
    HARMLESS,
    MAX_CONFIG_BYTES,
    MAX_PATTERNS,
    UNSUPPORTED_FIELDS,
    LoraConfig,
    check_activation,
    parse_adapter_config,
)
from loramux_adapters.errors import AdapterRejected, ConfigRejected

PEFT_FIELDS = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
READ_BY_NAME = {"peft_type", "init_lora_weights"}
MINIMAL = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def parse(fields: dict[str, Any]) -> LoraConfig:
    return parse_adapter_config(json.dumps(MINIMAL | fields).encode())


def refuse(fields: dict[str, Any]) -> ConfigRejected:
    with pytest.raises(ConfigRejected) as caught:
        parse(fields)
    return caught.value


def test_config_every_field_of_peft_is_decided_once() -> None:
    read = set(LoraConfig.__struct_fields__)
    decided = [*read, *HARMLESS, *READ_BY_NAME, *UNSUPPORTED_FIELDS]
    assert sorted(decided) == sorted(PEFT_FIELDS)


def test_config_from_peft_is_read(good_config: dict[str, Any]) -> None:
    config = parse_adapter_config(json.dumps(good_config).encode())
    assert (config.r, config.lora_alpha, config.use_rslora) == (8, 16.0, False)
    assert sorted(config.target_modules) == ["down_proj", "q_proj"]
    assert (config.rank_pattern, config.alpha_pattern, config.layers_to_transform) == ({}, {}, None)


def test_config_defaults_of_peft_switch_no_refused_field_on(good_config: dict[str, Any]) -> None:
    assert set(UNSUPPORTED_FIELDS) <= set(good_config)


SWITCHED_ON: dict[str, Any] = {
    "layer_replication": [[0, 2]],
    "use_qalora": True,
    "loftq_config": {"loftq_bits": 4},
    "kasa_config": {"beta": 0.1},
    "monteclora_config": {"num_samples": 8},
    "velora_config": {"num_groups": 64},
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 3},
    "megatron_config": {"hidden_size": 8},
}


def test_config_invocation_tokens_are_read() -> None:
    assert parse({"alora_invocation_tokens": [7, 8]}).alora_invocation_tokens == (7, 8)
    assert parse({"alora_invocation_tokens": None}).alora_invocation_tokens is None
    for wrong in ([], [-1], ["7"], [True], 7, [1 << 32]):
        refusal = refuse({"alora_invocation_tokens": wrong})
        assert (refusal.code, refusal.field) == ("config_invalid", "alora_invocation_tokens")


@pytest.mark.parametrize(
    ("field", "on"),
    [
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["mlp.experts.down_proj"]),
    ],
)
def test_config_activated_lora_refuses_fields_that_change_earlier_tokens(field: str, on: Any) -> None:
    with pytest.raises(ConfigRejected) as caught:
        check_activation({field: on, "alora_invocation_tokens": [7]})
    assert (caught.value.code, caught.value.field) == ("field_unsupported", field)
    assert "alora_invocation_tokens" in caught.value.message
    check_activation({field: on})
    check_activation({field: None, "alora_invocation_tokens": [7]})


@pytest.mark.parametrize("field", UNSUPPORTED_FIELDS)
def test_config_unsupported_field_is_refused_with_its_reason(field: str) -> None:
    refusal = refuse({field: SWITCHED_ON[field]})
    assert (refusal.code, refusal.field) == ("field_unsupported", field)
    assert all(
        part in refusal.message for part in (field, UNSUPPORTED_FIELDS[field].reason, UNSUPPORTED_FIELDS[field].way_out)
    )
    for off in (None, False, [], {}, ""):
        assert parse({field: off})


OTHER_TYPES = [kind.value for kind in peft.PeftType if kind.value not in ("LORA", "IA3")]


@pytest.mark.parametrize("peft_type", [*OTHER_TYPES, "lora", 1, {}])
def test_config_other_peft_types_are_refused(peft_type: Any) -> None:
    refusal = refuse({"peft_type": peft_type})
    assert (refusal.code, refusal.field) == ("peft_type_unsupported", "peft_type")
    assert str(peft_type) in refusal.message


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_config_initialisation_that_leaves_the_base_alone_is_accepted(value: Any) -> None:
    assert parse({"init_lora_weights": value, "eva_config": {"rho": 2.0}})


@pytest.mark.parametrize("value", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "lora_ga", "lora-ga"])
def test_config_initialisation_that_changes_the_base_is_refused(value: Any) -> None:
    refusal = refuse({"init_lora_weights": value})
    assert (refusal.code, refusal.field) == ("field_unsupported", "init_lora_weights")
    assert "changes the base" in refusal.message


def test_config_loftq_is_refused_without_the_conversion_that_peft_lacks_for_it() -> None:
    refusal = refuse({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}})
    assert (refusal.code, refusal.field) == ("field_unsupported", "init_lora_weights")
    assert "replace_lora_weights_loftq" in refusal.message
    assert "path_initial_model" not in refusal.message


@pytest.mark.parametrize("value", ["magic", "", 1, ["pissa"]])
def test_config_unknown_initialisation_is_refused(value: Any) -> None:
    refusal = refuse({"init_lora_weights": value})
    assert (refusal.code, refusal.field) == ("field_unsupported", "init_lora_weights")
    assert "known to leave the base alone" in refusal.message


def test_config_converted_pissa_is_plain_lora() -> None:
    """PEFT doubles r and alpha and leaves the sub-configurations of the initialisation in the file."""
    assert parse({"r": 16, "lora_alpha": 22.6, "lora_ga_config": {"direction": "ArB2r"}, "corda_config": {"x": 1}})


@pytest.mark.parametrize(("field", "value"), [("task_type", "QUESTION_ANS"), ("task_type", ["CAUSAL_LM"])])
def test_config_other_task_is_refused(field: str, value: Any) -> None:
    refusal = refuse({field: value})
    assert (refusal.code, refusal.field) == ("field_unsupported", field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "some"),
        ("bias", 1),
        ("r", -3),
        ("r", 0),
        ("r", "8"),
        ("r", 8.5),
        ("r", True),
        ("r", 10**30),
        ("lora_alpha", "nan"),
        ("lora_alpha", 1e300),
        ("lora_alpha", True),
        ("use_rslora", "true"),
        ("use_rslora", 1),
        ("target_modules", []),
        ("target_modules", ""),
        ("target_modules", [""]),
        ("target_modules", ["q_proj", 1]),
        ("target_modules", {"q_proj": 1}),
        ("target_modules", ["x" * 600]),
        ("exclude_modules", [None]),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": "4"}),
        ("rank_pattern", {"q_proj": 4.5}),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {f"a{i}": 1 for i in range(MAX_PATTERNS + 1)}),
        ("alpha_pattern", {"q_proj": None}),
        ("layers_to_transform", [-1]),
        ("layers_to_transform", "1"),
        ("layers_to_transform", True),
        ("layers_pattern", [1]),
        ("base_model_name_or_path", 1),
    ],
)
def test_config_wrong_type_or_range_is_refused_by_field(field: str, value: Any) -> None:
    refusal = refuse({field: value})
    assert (refusal.code, refusal.field) == ("config_invalid", field)
    assert field in refusal.message


@pytest.mark.parametrize("field", MINIMAL)
@pytest.mark.parametrize("absent", [True, False])
def test_config_missing_required_field_is_named(field: str, absent: bool) -> None:
    fields = {key: value for key, value in MINIMAL.items() if key != field} if absent else MINIMAL | {field: None}
    with pytest.raises(ConfigRejected) as caught:
        parse_adapter_config(json.dumps(fields).encode())
    assert (caught.value.code, caught.value.field) == ("field_missing", field)


@pytest.mark.parametrize("value", [True, 1, 0.5, "on", [1], [0], {"a": {"b": True}}])
def test_config_unknown_field_that_is_on_is_refused_by_name(value: Any) -> None:
    refusal = refuse({"new_future_field": value})
    assert (refusal.code, refusal.field) == ("field_unknown", "new_future_field")
    assert "'new_future_field'" in refusal.message


@pytest.mark.parametrize("value", [None, False, "", [], {}, 0, 0.0, "none", "None", {"a": None, "b": [False]}])
def test_config_unknown_field_that_is_off_is_accepted(value: Any) -> None:
    assert parse({"new_future_field": value}) == parse({})


def test_config_layers_are_read_as_in_peft() -> None:
    assert parse({"layers_to_transform": 0}).layers_to_transform == (0,)
    assert parse({"layers_to_transform": [0, 2]}).layers_to_transform == (0, 2)
    assert parse({"layers_to_transform": 1, "layers_pattern": "h"}).layers_pattern == ("h",)
    assert parse({"layers_to_transform": 1, "layers_pattern": ""}).layers_pattern == ()
    assert refuse({"target_modules": ".*", "layers_to_transform": [1]}).field == "layers_to_transform"
    assert refuse({"target_modules": ".*", "layers_pattern": []}).field == "layers_pattern"
    assert refuse({"layers_pattern": ["h"]}).field == "layers_pattern"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b'{"r": NaN}',
        b'{"r": Infinity}',
        b'{"r": 8, "r": 9}',
        b'\xef\xbb\xbf{"r": 8}',
        b'{"r": "\xff"}',
        b'{"\\ud800": 1}',
        b"[" * 500_000,
        b'{"r":' + b"9" * 5_000 + b"}",
    ],
)
def test_config_other_than_a_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigRejected) as caught:
        parse_adapter_config(data)
    assert caught.value.code == "config_invalid"


@pytest.mark.parametrize("field", ["a_new_field", "auto_mapping", "init_lora_weights", "task_type", "r", "bias"])
@pytest.mark.parametrize("depth", [40, 200, 900])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_config_of_deep_nesting_is_refused(field: str, depth: int, brackets: str) -> None:
    opening, closing = brackets[:-1], brackets[-1]
    nested = opening * depth + ("0" if ":" in opening else "") + closing * depth
    data = json.dumps(MINIMAL)[:-1] + f', "{field}": {nested}}}'
    if field == "r":
        data = f'{{"r": {nested}}}'
    with pytest.raises(ConfigRejected) as caught:
        parse_adapter_config(data.encode())
    assert caught.value.code == "config_invalid"
    assert "nested too deeply" in caught.value.message


def test_config_of_huge_size_is_refused_unread() -> None:
    with pytest.raises(ConfigRejected) as caught:
        parse_adapter_config(b" " * (MAX_CONFIG_BYTES + 1))
    assert caught.value.code == "config_too_large"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=500, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(sorted(PEFT_FIELDS)) | st.text(max_size=5), values, max_size=4))
def test_config_any_values_are_read_or_refused(fields: dict[str, Any]) -> None:
    try:
        config = parse(fields)
    except AdapterRejected as refusal:
        assert refusal.code in {  # noqa: PT017 - either outcome is right
            "config_invalid",
            "field_missing",
            "field_unsupported",
            "field_unknown",
            "peft_type_unsupported",
        }
    else:
        assert config.r >= 1
        assert abs(config.lora_alpha) <= 1e6


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60))
def test_config_any_bytes_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(AdapterRejected):
        parse_adapter_config(data)

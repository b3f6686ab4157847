"""IA3's adapter_config.json: every field of PEFT is decided, any other is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import peft
import pytest

from loramux_adapters.config import Ia3Config, parse_adapter_config
from loramux_adapters.errors import AdapterRejected

DOCUMENT = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]).to_dict() | {"target_modules": ["q_proj"]}


def parse(fields: dict[str, Any]) -> Any:
    return parse_adapter_config(json.dumps(DOCUMENT | {"feedforward_modules": []} | fields).encode())


def code_of(fields: dict[str, Any]) -> str | None:
    try:
        parse(fields)
    except AdapterRejected as refusal:
        return refusal.code
    return None


def test_ia3_config_from_peft_is_read() -> None:
    config = parse({"feedforward_modules": ["down_proj"], "modules_to_save": ["lm_head"]})
    assert isinstance(config, Ia3Config)
    assert (config.target_modules, config.feedforward_modules) == (("q_proj",), ("down_proj",))
    assert config.modules_to_save == ("lm_head",)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(peft.IA3Config)])
def test_ia3_config_every_field_of_peft_is_known(field: str) -> None:
    assert code_of({field: "surprising"}) != "field_unknown"


@pytest.mark.parametrize("fields", [{"r": 8}, {"layers_to_transform": [0]}, {"magic": True}])
def test_ia3_config_unknown_field_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(AdapterRejected) as caught:
        parse(fields)
    assert (caught.value.code, caught.value.field) == ("field_unknown", next(iter(fields)))

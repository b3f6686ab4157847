"""Files that differ from those of PEFT 0.21 and mean the same: the engine's tokens are those of the original."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapter_zoo import Asked, serve
from formats import FORMATS, LORA, FormatZoo
from safetensors.torch import load_file, save_file

from loramux.catalog.validation.checkpoint_files import read_parameter
from loramux_adapters.base import describe_base
from loramux_adapters.convert.conversion import convert_adapter
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits, validate_adapter

Tensors = dict[str, torch.Tensor]
EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"
PROMPT = tuple(range(5, 22))


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    made = FormatZoo("qwen2", tmp_path_factory.mktemp("variants"), [], tied=request.param)
    made.make_format("plain", peft.LoraConfig(**LORA | {"target_modules": ["q_proj", "o_proj", "down_proj"]}), 1)
    return made


def variant(
    zoo: FormatZoo, of: str, name: str, change: Callable[[Tensors], Tensors], fields: dict[str, Any] | None = None
) -> Path:
    """Save a changed copy of an adapter."""
    target = zoo.adapters / name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(zoo.adapters / of, target)
    save_file(change(load_file(target / WEIGHTS_NAME)), target / WEIGHTS_NAME, metadata={"format": "pt"})
    document = json.loads((target / CONFIG_NAME).read_text()) | (fields or {})
    (target / CONFIG_NAME).write_text(json.dumps(document))
    return target


def served(zoo: FormatZoo, name: str) -> list[int]:
    return serve(zoo, zoo.engine(), [Asked("one", name, PROMPT, 8)])["one"]


def of_peft(zoo: FormatZoo, name: str | None) -> list[int]:
    return zoo.answer(Asked("one", name, PROMPT, 8))


def copies(zoo: FormatZoo) -> Tensors:
    """Return the base's embedding and head, as PEFT saves them with an adapter."""
    weights = zoo._base().state_dict()
    return {EMBEDDING: weights["model.embed_tokens.weight"].clone(), HEAD: weights["lm_head.weight"].clone()}


def test_copies_of_the_base_in_a_lora_are_dropped(zoo: FormatZoo) -> None:
    variant(zoo, "plain", "copies", lambda tensors: tensors | copies(zoo))
    assert served(zoo, "copies") == of_peft(zoo, "plain") == of_peft(zoo, "copies") != of_peft(zoo, None)


def test_copies_that_differ_from_the_base_are_refused(zoo: FormatZoo) -> None:
    other = copies(zoo)[EMBEDDING] * 1.01
    folder = variant(zoo, "plain", "resaved", lambda tensors: tensors | {EMBEDDING: other})
    validate_adapter(folder, describe_base(zoo.base), PlanLimits(max_rank=64))  # the files alone cannot tell
    with pytest.raises(AssertionError, match=r"embed_tokens.* not this base's"):
        served(zoo, "resaved")


def test_saved_modules_with_their_copies_are_served(zoo: FormatZoo) -> None:
    zoo.make_format("saved", FORMATS["saved_embedding"], 3)

    def repeated(tensors: Tensors) -> Tensors:
        stem = EMBEDDING.removesuffix("weight")
        own = {f"{stem}modules_to_save.weight": tensors[EMBEDDING].clone()}
        return tensors | own | {f"{stem}original_module.weight": copies(zoo)[EMBEDDING]}

    variant(zoo, "saved", "repeated", repeated)
    assert served(zoo, "repeated") == of_peft(zoo, "saved") != of_peft(zoo, None)


@pytest.mark.parametrize("name", ["plain", "dora"])
def test_targeted_layers_without_tensors_keep_the_base(zoo: FormatZoo, name: str) -> None:
    config = peft.LoraConfig(**LORA | {"target_modules": ["q_proj", "o_proj"]}, use_dora=name == "dora")
    zoo.make_format(f"{name} whole", config, 4)
    variant(
        zoo,
        f"{name} whole",
        f"{name} partial",
        lambda tensors: {key: tensor for key, tensor in tensors.items() if ".layers.1." not in key},
    )
    assert served(zoo, f"{name} partial") == of_peft(zoo, f"{name} partial") != of_peft(zoo, None)


def test_pair_with_one_missing_tensor_is_refused(zoo: FormatZoo) -> None:
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    folder = variant(zoo, "plain", "half", lambda tensors: {k: v for k, v in tensors.items() if k != key})
    with pytest.raises(AdapterRejected) as caught:
        validate_adapter(folder, describe_base(zoo.base), PlanLimits(max_rank=64))
    assert (caught.value.code, caught.value.field) == ("tensors_missing", key)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_factors_taken_from_the_base_as_saved_are_served(zoo: FormatZoo, init: str) -> None:
    fields = LORA | {"target_modules": ["k_proj", "o_proj", "up_proj"], "rank_pattern": {"up_proj": 11}}
    zoo.make_format(init, peft.LoraConfig(**fields, init_lora_weights=init, use_rslora=True), 6)
    (into := zoo.adapters / f"{init} converted").mkdir()
    convert_adapter(
        zoo.adapters / init,
        into,
        describe_base(zoo.base),
        PlanLimits(max_rank=64),
        lambda module: read_parameter(str(zoo.base), f"{module}.weight"),
    )
    assert served(zoo, into.name) == of_peft(zoo, init) != of_peft(zoo, None)


def test_random_start_of_pissa_is_refused_with_the_way_out(zoo: FormatZoo) -> None:
    folder = variant(zoo, "plain", "random", lambda tensors: tensors, {"init_lora_weights": "pissa_niter_4"})
    with pytest.raises(AdapterRejected, match="path_initial_model_for_weight_conversion") as caught:
        validate_adapter(folder, describe_base(zoo.base), PlanLimits(max_rank=64))
    assert caught.value.field == "init_lora_weights"


def test_unknown_fields_at_neutral_values_change_nothing(zoo: FormatZoo) -> None:
    fields = {"a_later_field": 0, "another": {"on": False, "rate": 0.0}, "third": "none", "lorap_emb_lr": 1e-6}
    variant(zoo, "plain", "later", lambda tensors: tensors, fields)
    assert served(zoo, "later") == of_peft(zoo, "plain")

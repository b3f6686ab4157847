"""Adapters in other spellings: after renaming, the engine's tokens are those of the base with the adapter merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_zoo import Asked, serve
from formats import LORA, FormatZoo
from safetensors.torch import load_file, save_file

from loramux_adapters.base import describe_base, expert_weights
from loramux_adapters.convert.renaming import Renaming, rename_adapter
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.names import TensorNames
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model."
PROMPTS = (tuple(range(5, 22)), (40, 7, 7, 91, 3))
LIMITS = PlanLimits(max_rank=64)
OLD = {
    "gpt_oss": ("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
    "mixtral": ("block_sparse_moe", {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}),
    "qwen3_moe": ("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
}


@pytest.fixture(scope="module", params=OLD)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    made = FormatZoo(request.param, tmp_path_factory.mktemp(request.param), [])
    made.family = request.param
    return made


def greedy(model: torch.nn.Module, prompt: tuple[int, ...]) -> list[int]:
    keywords = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        return model.generate(input_ids=torch.tensor([prompt]), **keywords)[0, len(prompt) :].tolist()


def served(zoo: FormatZoo, name: str) -> list[list[int]]:
    asked = [Asked(str(number), name, prompt, 8) for number, prompt in enumerate(PROMPTS)]
    answers = serve(zoo, zoo.engine(), asked)
    return [answers[one.name] for one in asked]


def renamed(zoo: FormatZoo, name: str) -> Renaming | None:
    """Rename an adapter to `name` with "renamed" behind it."""
    into = zoo.adapters / f"{name} renamed"
    into.mkdir(exist_ok=True)
    return rename_adapter(zoo.adapters / name, into, describe_base(zoo.base), LIMITS)


class OldMixtureAdapter:
    """A LoRA on the experts, the router and attention as transformers 4 and PEFT saved it, and the merged base."""

    def __init__(self, zoo: FormatZoo, name: str, fields: dict[str, Any], leave_out: str = "nothing") -> None:
        self.folder, self._family = zoo.adapters / name, zoo.family
        self.merged = copy.deepcopy(zoo._base())
        self._config = peft.LoraConfig(**LORA | {"r": 3, "lora_alpha": 7, "target_modules": []} | fields)
        self._leave_out, self._tensors = leave_out, {}
        torch.manual_seed(len(name))
        mixture, parameters = OLD[zoo.family]
        for index, layer in enumerate(self.merged.model.layers):
            self._add(f"model.layers.{index}.self_attn.q_proj", layer.self_attn.q_proj.weight.data)
            if not hasattr(layer.mlp, "experts"):
                continue
            stem = f"model.layers.{index}.{mixture}"
            router = "router" if zoo.family == "gpt_oss" else "gate"
            self._add(f"{stem}.{router}", getattr(layer.mlp, router).weight.data)
            for parameter, linears in parameters.items():
                for expert, weight in enumerate(expert_weights(layer.mlp.experts, parameter)):
                    for linear, rows in zip(linears, self._divided(weight, len(linears)), strict=True):
                        self._add(f"{stem}.experts.{expert}.{linear}", rows)
        self.folder.mkdir(parents=True, exist_ok=True)
        document = self._config.to_dict() | {"target_modules": sorted({key.split(".")[-3] for key in self._tensors})}
        document |= {"target_modules": fields.get("target_modules", document["target_modules"])}
        (self.folder / CONFIG_NAME).write_text(json.dumps(document, default=list))
        save_file(self._tensors, self.folder / WEIGHTS_NAME, metadata={"format": "pt"})

    def _divided(self, weight: torch.Tensor, parts: int) -> list[torch.Tensor]:
        """Return views of the rows of each linear: gpt-oss takes those of gate and up in turn."""
        if self._family == "gpt_oss":
            return [weight[part::parts] for part in range(parts)]
        return list(weight.chunk(parts))

    @torch.no_grad()
    def _add(self, name: str, weight: torch.Tensor) -> None:
        if self._leave_out in name:
            return
        rank = next((r for end, r in self._config.rank_pattern.items() if name.endswith(end)), self._config.r)
        alpha = next((a for end, a in self._config.alpha_pattern.items() if name.endswith(end)), 7)
        a, b = torch.randn(rank, weight.shape[1]) * 0.3, torch.randn(weight.shape[0], rank) * 0.3
        self._tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
        weight += alpha / (rank**0.5 if self._config.use_rslora else rank) * b @ a


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "nothing"),
    "rslora": ({"use_rslora": True}, "nothing"),
    "regex": ({"target_modules": r"model\.layers.*(q_proj|gate|router|w\d|gate_proj|up_proj|down_proj)"}, "nothing"),
    "all-linear": ({"target_modules": "all-linear"}, "nothing"),
    "patterns": (
        {"rank_pattern": {"q_proj": 5, "w3": 4, "up_proj": 4}, "alpha_pattern": {"w1": 9, "gate_proj": 9, "gate": 2}},
        "nothing",
    ),
    "some experts": ({}, "experts.1."),
    "no gate": ({}, ".w1"),
    "one layer without": ({}, "layers.2."),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_as_linears_of_transformers_4_answer_as_merged(zoo: FormatZoo, case: str) -> None:
    fields, leave_out = CASES[case]
    leave_out = ".gate_proj" if leave_out == ".w1" and zoo.family != "mixtral" else leave_out
    old = OldMixtureAdapter(zoo, case, fields, leave_out)
    assert renamed(zoo, case) is not None
    wanted = [greedy(old.merged, prompt) for prompt in PROMPTS]
    assert served(zoo, f"{case} renamed") == wanted
    assert wanted != [greedy(zoo._base(), prompt) for prompt in PROMPTS]


def test_experts_as_linears_are_read_by_peft_alike(zoo: FormatZoo) -> None:
    """PEFT converts the same files itself, but for gpt-oss, and reads what the renaming wrote."""
    old = OldMixtureAdapter(zoo, "for peft", {})
    renamed(zoo, "for peft")
    for name in ("for peft", "for peft renamed")[zoo.family == "gpt_oss" :]:
        model = peft.PeftModel.from_pretrained(zoo._base(), zoo.adapters / name).eval()
        assert [greedy(model, prompt) for prompt in PROMPTS] == [greedy(old.merged, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"target_modules": ["q_proj"]}, "tensors_unexpected", None),
        ({"use_dora": True}, "field_unsupported", "use_dora"),
        ({"r": 4}, "shape_mismatch", None),
    ],
)
def test_experts_that_contradict_their_configuration_are_refused(
    zoo: FormatZoo, fields: dict[str, Any], code: str, field: str | None
) -> None:
    old = OldMixtureAdapter(zoo, "wrong", {})
    document = json.loads((old.folder / CONFIG_NAME).read_text())
    (old.folder / CONFIG_NAME).write_text(json.dumps(document | fields))
    with pytest.raises(AdapterRejected) as caught:
        renamed(zoo, "wrong")
    assert caught.value.code == code
    assert field is None or caught.value.field == field


def test_stacked_experts_with_the_adapters_name_answer_as_the_original(zoo: FormatZoo) -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(
        **LORA | {"target_modules": ["q_proj"]}, target_parameters=parameters, rank_pattern={"down_proj": 3}
    )
    zoo.make_format("stacked", config, 7)
    respelled(zoo, "stacked", "stacked and named", with_adapter_name)
    assert renamed(zoo, "stacked and named") is not None
    assert served(zoo, "stacked and named renamed") == [zoo.answer(Asked("o", "stacked", p, 8)) for p in PROMPTS]


# ---- names of modules


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    made = FormatZoo("gemma3", tmp_path_factory.mktemp("dense"), [])
    made.make_format("plain", peft.LoraConfig(**LORA | {"target_modules": ["q_proj", "o_proj", "down_proj"]}), 1)
    made.make_format("dora", peft.LoraConfig(**LORA, use_dora=True), 2)
    made.make_format("saved", peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"]), 3)
    return made


def respelled(zoo: FormatZoo, of: str, name: str, change: Any, fields: dict[str, Any] | None = None) -> Path:
    target = zoo.adapters / name
    target.mkdir(exist_ok=True)
    tensors = load_file(zoo.adapters / of / WEIGHTS_NAME)
    save_file({change(key): tensor for key, tensor in tensors.items()}, target / WEIGHTS_NAME)
    document = json.loads((zoo.adapters / of / CONFIG_NAME).read_text())
    (target / CONFIG_NAME).write_text(json.dumps(document | (fields or {})))
    return target


def with_adapter_name(key: str) -> str:
    for tail in ("lora_A", "lora_B", "lora_magnitude_vector"):
        key = key.replace(f".{tail}", f".{tail}.default")
    return key.replace("embed_tokens.weight", "embed_tokens.modules_to_save.default.weight")


SPELLINGS = {
    "adapter's name": with_adapter_name,
    "multimodal, transformers 4.52": lambda key: key.replace(f"{PREFIX}model.", f"{PREFIX}model.language_model."),
    "multimodal, transformers 4.49": lambda key: key.replace(f"{PREFIX}model.", f"{PREFIX}language_model.model."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("of", ["plain", "dora", "saved"])
def test_other_names_of_modules_answer_as_the_original(dense: FormatZoo, of: str, spelling: str) -> None:
    name = f"{of} {spelling}"
    respelled(dense, of, name, SPELLINGS[spelling])
    done = renamed(dense, name)
    assert done is not None
    assert done.renamed > 0
    wanted = [dense.answer(Asked("one", of, prompt, 8)) for prompt in PROMPTS]
    assert served(dense, f"{name} renamed") == wanted
    assert renamed(dense, f"{name} renamed") is None, "it is the spelling of PEFT 0.21 now"


def test_parts_for_images_are_left_out(dense: FormatZoo) -> None:
    folder = respelled(dense, "plain", "images", SPELLINGS["multimodal, transformers 4.52"])
    tensors = load_file(folder / WEIGHTS_NAME)
    vision = f"{PREFIX}model.vision_tower.encoder.layers.0.self_attn.q_proj"
    extra = {f"{vision}.lora_A.weight": torch.ones(5, 8), f"{vision}.lora_B.weight": torch.ones(8, 5)}
    save_file(tensors | extra, folder / WEIGHTS_NAME)
    done = renamed(dense, "images")
    assert done is not None
    assert (done.renamed, done.dropped) == (len(tensors), 2)
    wanted = [dense.answer(Asked("one", "plain", prompt, 8)) for prompt in PROMPTS]
    assert served(dense, "images renamed") == wanted


def test_two_tensors_of_one_meaning_are_refused(dense: FormatZoo) -> None:
    folder = respelled(dense, "plain", "twice", lambda key: key)
    tensors = load_file(folder / WEIGHTS_NAME)
    again = {with_adapter_name(key): tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors | again, folder / WEIGHTS_NAME)
    with pytest.raises(AdapterRejected) as caught:
        renamed(dense, "twice")
    assert caught.value.code == "names_ambiguous"


def test_every_name_that_peft_writes_is_left_alone(dense: FormatZoo) -> None:
    names = TensorNames(describe_base(dense.base))
    for of in ("plain", "dora", "saved"):
        assert not names.are_other(load_file(dense.adapters / of / WEIGHTS_NAME))
    assert transformers.__version__.startswith("5.")

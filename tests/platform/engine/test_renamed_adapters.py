"""Adapters in other spellings: after renaming, the engine's tokens are those of the base with the adapter merged."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapter_zoo import Asked, serve
from formats import FORMATS, LORA, FormatZoo
from safetensors.torch import load_file, save_file

from loramux_adapters.base import describe_base, expert_weights
from loramux_adapters.convert.renaming import Renaming, rename_adapter
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.names import TensorNames
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits, validate_adapter

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
    """Rename an adapter to `name` followed by "renamed"."""
    into = zoo.adapters / f"{name} renamed"
    into.mkdir(exist_ok=True)
    return rename_adapter(zoo.adapters / name, into, describe_base(zoo.base), LIMITS)


class OldMixtureAdapter:
    """A LoRA on the experts, the router and attention as transformers 4 and PEFT saved it, and the merged base."""

    def __init__(
        self,
        zoo: FormatZoo,
        name: str,
        fields: dict[str, Any],
        leave_out: str = "nothing",
        linears: dict[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.folder, self._family = zoo.adapters / name, zoo.family
        self.merged = copy.deepcopy(zoo._base())
        self._config = peft.LoraConfig(**LORA | {"r": 3, "lora_alpha": 7, "target_modules": []} | fields)
        self._leave_out, self._tensors = leave_out, {}
        torch.manual_seed(len(name))
        mixture, parameters = OLD[zoo.family]
        divided = linears or parameters
        for index, layer in enumerate(self.merged.model.layers):
            self._add(f"model.layers.{index}.self_attn.q_proj", layer.self_attn.q_proj.weight.data)
            if not hasattr(layer.mlp, "experts"):
                continue
            stem = f"model.layers.{index}.{mixture}"
            router = "router" if zoo.family == "gpt_oss" else "gate"
            self._add(f"{stem}.{router}", getattr(layer.mlp, router).weight.data)
            for parameter, names in divided.items():
                for expert, weight in enumerate(expert_weights(layer.mlp.experts, parameter)):
                    for linear, rows in zip(names, self._divided(weight, len(names)), strict=True):
                        self._add(f"{stem}.experts.{expert}.{linear}", rows)
        self.folder.mkdir(parents=True, exist_ok=True)
        document = self._config.to_dict() | {"target_modules": sorted({key.split(".")[-3] for key in self._tensors})}
        document |= {"target_modules": fields.get("target_modules", document["target_modules"])}
        (self.folder / CONFIG_NAME).write_text(json.dumps(document, default=list))
        save_file(self._tensors, self.folder / WEIGHTS_NAME, metadata={"format": "pt"})

    def _divided(self, weight: torch.Tensor, parts: int) -> list[torch.Tensor]:
        """Return views of the rows of each linear: gpt-oss alternates those of gate and up."""
        if self._family == "gpt_oss" and parts > 1:
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


def test_experts_in_lists_of_linears_answer_as_merged(zoo: FormatZoo) -> None:
    """unsloth's gpt-oss: `gate_up_projs.3`, whose outputs are in the order of the parameter, and `router.linear`."""
    _, parameters = OLD[zoo.family]
    zoo_of_lists = {parameter: (parameter,) for parameter in parameters}
    old = OldMixtureAdapter(zoo, "lists", {}, linears=zoo_of_lists)
    tensors = {
        re.sub(r"experts\.(\d+)\.(\w+)\.", r"experts.\2s.\1.", key).replace(
            ".router.lora", ".router.linear.lora"
        ): tensor
        for key, tensor in load_file(old.folder / WEIGHTS_NAME).items()
    }
    save_file(tensors, old.folder / WEIGHTS_NAME)
    document = json.loads((old.folder / CONFIG_NAME).read_text())
    document["target_modules"] = ["q_proj", "router.linear", "gate", "gate_up_projs", "down_projs"]
    (old.folder / CONFIG_NAME).write_text(json.dumps(document))
    assert renamed(zoo, "lists") is not None
    assert served(zoo, "lists renamed") == [greedy(old.merged, prompt) for prompt in PROMPTS]


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
    for seed, name in enumerate(("embedding", "head_bias", "head_tokens"), start=4):
        made.make_format(name, FORMATS[name], seed)
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
    for tail in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
        key = key.replace(f".{tail}", f".{tail}.default")
    key = key.replace("trainable_tokens_delta", "trainable_tokens_delta.default")
    return key.replace("embed_tokens.weight", "embed_tokens.modules_to_save.default.weight")


SPELLINGS = {
    "adapter's name": with_adapter_name,
    "compiled": lambda key: key.replace(PREFIX, f"{PREFIX}_orig_mod."),
    "compiled after PEFT": lambda key: f"_orig_mod.{key}",
    "compiled layers": lambda key: re.sub(r"layers\.(\d+)\.", r"layers.\1._orig_mod.", key),
    "sharded and checkpointed": lambda key: re.sub(
        r"layers\.(\d+)\.", r"layers.\1._fsdp_wrapped_module._checkpoint_wrapped_module.", key
    ),
    "distributed": lambda key: f"module.{key}",
    "distributed within": lambda key: key.replace(PREFIX, f"{PREFIX}module."),
    "lightning": lambda key: f"model.{key}",
    "PEFT twice": lambda key: f"{PREFIX}{key}",
    "without PEFT's prefix": lambda key: key.removeprefix(PREFIX),
    "multimodal, transformers 4.52": lambda key: key.replace(f"{PREFIX}model.", f"{PREFIX}model.language_model."),
    "multimodal, transformers 4.49": lambda key: key.replace(f"{PREFIX}model.", f"{PREFIX}language_model.model."),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("of", ["plain", "dora", "saved", "embedding", "head_bias", "head_tokens"])
def test_other_names_of_modules_answer_as_the_original(dense: FormatZoo, of: str, spelling: str) -> None:
    name = f"{of} {spelling}"
    respelled(dense, of, name, SPELLINGS[spelling])
    done = renamed(dense, name)
    assert done is not None
    assert done.renamed > 0
    wanted = [dense.answer(Asked("one", of, prompt, 8)) for prompt in PROMPTS]
    assert served(dense, f"{name} renamed") == wanted
    assert renamed(dense, f"{name} renamed") is None, "it is the spelling of PEFT 0.21 now"


def test_names_below_an_unknown_module_are_refused_with_its_name(dense: FormatZoo) -> None:
    respelled(dense, "plain", "wrapped", lambda key: key.replace(PREFIX, f"{PREFIX}talker.inner."))
    assert renamed(dense, "wrapped") is None
    with pytest.raises(
        AdapterRejected, match=r"'base_model\.model\.talker\.inner\.' .* 'base_model\.model\.'"
    ) as caught:
        validate_adapter(dense.adapters / "wrapped", describe_base(dense.base), LIMITS)
    assert caught.value.code == "tensors_missing"


def test_pair_of_a_tied_base_in_other_names_answers_as_the_original(tmp_path: Path) -> None:
    """PEFT takes the head out of target_modules; its scale is its own."""
    zoo = FormatZoo("gemma3", tmp_path, [], tied=True)
    zoo.make_format("tied", FORMATS["tied_pair"], 5)
    respelled(zoo, "tied", "named", lambda key: key.replace(f"{PREFIX}model.", f"{PREFIX}model.language_model."))
    assert renamed(zoo, "named") is not None
    assert served(zoo, "named renamed") == [zoo.answer(Asked("o", "tied", prompt, 8)) for prompt in PROMPTS]


# ---- parts of joined linears


JOINED = {
    "phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    "qwen3_5": {"in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v")},
    "qwen3_next": {
        "in_proj_qkvz": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
        "in_proj_ba": ("in_proj_b", "in_proj_a"),
    },
}


def parts_of(module: torch.nn.Module, joined: str, config: Any) -> list[torch.Tensor]:
    """Return views of the rows of each part, as transformers' own forward cuts the outputs."""
    weight = getattr(module, joined).weight.data
    if joined == "gate_up_proj":
        return list(weight.chunk(2))
    if joined == "qkv_proj":
        kv = config.num_key_value_heads * module.head_dim
        return list(weight.split([len(weight) - 2 * kv, kv, kv]))
    keys, each = module.num_k_heads, module.num_v_heads // module.num_k_heads
    if joined == "in_proj_qkv":
        return list(weight.split([module.key_dim, module.key_dim, module.value_dim]))
    by_head = weight.view(keys, -1, weight.shape[1])
    k, v = module.head_k_dim, each * module.head_v_dim
    return list(by_head.split([each, each] if joined == "in_proj_ba" else [k, k, v, v], dim=1))


@pytest.mark.parametrize("leave_out", ["nothing", "first", "last"])
@pytest.mark.parametrize("family", JOINED)
def test_parts_of_joined_linears_answer_as_merged(family: str, leave_out: str, tmp_path: Path) -> None:
    zoo = FormatZoo(family, tmp_path, [])
    merged, folder = copy.deepcopy(zoo._base()), zoo.adapters / "parts"
    ranks, alphas, tensors = {"q_proj": 5, "in_proj_v": 4}, {"k_proj": 2, "in_proj_q": 9, "in_proj_a": 3}, {}
    torch.manual_seed(4)
    for name, module in merged.named_modules():
        for joined, leaves in JOINED[family].items():
            if not hasattr(module, joined):
                continue
            for leaf, part in zip(leaves, parts_of(module, joined, merged.config), strict=True):
                if leaf == {"first": leaves[0], "last": leaves[-1]}.get(leave_out):
                    continue
                rank = ranks.get(leaf, 3)
                a, b = torch.randn(rank, part.shape[-1]) * 0.3, torch.randn(part[..., 0].numel(), rank) * 0.3
                tensors |= {f"{PREFIX}{name}.{leaf}.lora_A.weight": a, f"{PREFIX}{name}.{leaf}.lora_B.weight": b}
                part.add_((alphas.get(leaf, 6) / rank * b @ a).view(part.shape))
    folder.mkdir(parents=True)
    targets = sorted({key.split(".")[-3] for key in tensors})
    fields = {"r": 3, "lora_alpha": 6, "target_modules": targets, "rank_pattern": ranks, "alpha_pattern": alphas}
    (folder / CONFIG_NAME).write_text(json.dumps(fields | {"peft_type": "LORA", "task_type": "CAUSAL_LM"}))
    save_file(tensors, folder / WEIGHTS_NAME)
    assert renamed(zoo, "parts") is not None
    wanted = [greedy(merged, prompt) for prompt in PROMPTS]
    assert served(zoo, "parts renamed") == wanted
    assert wanted != [greedy(zoo._base(), prompt) for prompt in PROMPTS]


def test_parts_of_joined_linears_with_dora_are_refused(tmp_path: Path) -> None:
    zoo = FormatZoo("phi3", tmp_path, [])
    zoo.make_format("dora", peft.LoraConfig(**LORA | {"target_modules": ["qkv_proj"]}, use_dora=True), 1)
    respelled(zoo, "dora", "split", lambda key: key.replace("qkv_proj", "q_proj"), {"target_modules": ["q_proj"]})
    with pytest.raises(AdapterRejected) as caught:
        renamed(zoo, "split")
    assert (caught.value.code, caught.value.field) == ("field_unsupported", "use_dora")


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


def test_nemotron_of_the_published_module_names_answers_as_merged(tmp_path: Path) -> None:
    """`backbone.` and experts as linears without a gate: the names of the checkpoint's own code."""
    zoo = FormatZoo("nemotron_h", tmp_path, [])
    merged, tensors = copy.deepcopy(zoo._base()), {}
    torch.manual_seed(4)

    @torch.no_grad()
    def add(name: str, weight: torch.Tensor) -> None:
        a, b = torch.randn(3, weight.shape[1]) * 0.2, torch.randn(weight.shape[0], 3) * 0.2
        stem = f"{PREFIX}backbone.{name}"
        tensors.update({f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b})
        weight += 2 * b @ a

    for index, layer in enumerate(merged.model.layers):
        for name, linear in layer.mixer.named_modules():
            if isinstance(linear, torch.nn.Linear):
                add(f"layers.{index}.mixer.{name}", linear.weight.data)
        if hasattr(layer.mixer, "experts"):
            for parameter in ("up_proj", "down_proj"):
                for expert, weight in enumerate(expert_weights(layer.mixer.experts, parameter)):
                    add(f"layers.{index}.mixer.experts.{expert}.{parameter}", weight)
    folder = zoo.adapters / "published"
    folder.mkdir(parents=True)
    targets = sorted({key.split(".")[-3] for key in tensors})
    config = peft.LoraConfig(**LORA | {"r": 3, "lora_alpha": 6, "target_modules": targets})
    (folder / CONFIG_NAME).write_text(json.dumps(config.to_dict(), default=list))
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    assert renamed(zoo, "published") is not None
    wanted = [greedy(merged, prompt) for prompt in PROMPTS]
    assert served(zoo, "published renamed") == wanted
    assert wanted != [greedy(zoo._base(), prompt) for prompt in PROMPTS]

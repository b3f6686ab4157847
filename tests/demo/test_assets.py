from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from loramux_adapters.base import describe_base
from loramux_adapters.plan import PlanLimits, validate_adapter
from loramux_demo.assets import ASSETS, MODEL_NAME, OWNERS, TOOLS, adapter_folder, base_folder, load_prompts
from loramux_demo.train.dataset import STYLES
from loramux_demo.train.models import RECIPES, exact, greedy_answers, load, write_questions

ADAPTERS = [adapter for adapters in OWNERS.values() for adapter in adapters]


def test_owners_cover_every_adapter():
    assert sorted(ADAPTERS) == sorted(RECIPES) == sorted(set(STYLES) - {"base"})
    assert sorted(ADAPTERS) == sorted(folder.name for folder in (ASSETS / "adapters").iterdir())


def test_assets_are_small_and_contain_no_local_paths():
    files = [path for path in ASSETS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5_500_000
    for path in files:
        if path.suffix in {".json", ".jinja"}:
            assert not re.search(r'"[/~][\w/]', path.read_text()), f"{path} holds an absolute path"


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_has_two_files_in_bfloat16(name):
    folder = adapter_folder(name)
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    config, recipe = json.loads((folder / "adapter_config.json").read_text()), RECIPES[name]
    assert config["base_model_name_or_path"] == MODEL_NAME
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (recipe.r, recipe.lora_alpha, recipe.use_rslora)
    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        assert {weights.get_tensor(key).dtype for key in weights.keys()} == {torch.bfloat16}  # noqa: SIM118 - no mapping


def test_adapters_mix_ranks_targets_and_rslora():
    configs = RECIPES.values()
    assert len({config.r for config in configs}) >= 4
    assert len({str(config.target_modules) for config in configs}) >= 3
    assert any(config.use_rslora for config in configs)


@pytest.mark.parametrize("name", ADAPTERS)
def test_server_accepts_every_adapter(name):
    plan = validate_adapter(
        adapter_folder(name), describe_base(base_folder()), PlanLimits(max_rank=64, max_bytes=1 << 20)
    )
    assert {pair.rank for pair in plan.pairs} == {RECIPES[name].r}


def test_assets_load_with_transformers_and_peft():
    model = AutoModelForCausalLM.from_pretrained(base_folder())
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size >= len(AutoTokenizer.from_pretrained(base_folder()))
    adapted = PeftModel.from_pretrained(model, adapter_folder(ADAPTERS[0]), adapter_name=ADAPTERS[0])
    for name in ADAPTERS[1:]:
        adapted.load_adapter(adapter_folder(name), adapter_name=name)
    assert set(adapted.peft_config) == set(ADAPTERS)


def test_questions_equal_the_training_scripts(tmp_path: Path):
    write_questions(tmp_path / "questions.json")
    assert (tmp_path / "questions.json").read_text() == (ASSETS / "questions.json").read_text()


def test_prompts_are_at_least_sixty_spread_over_all_models():
    prompts = load_prompts()
    counts = Counter(prompt.adapter for prompt in prompts)
    assert len(prompts) >= 60
    assert set(counts) == {None, *ADAPTERS}
    assert min(counts.values()) >= 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["base", *ADAPTERS])
def test_assets_give_the_expected_answers_with_peft(name, dtype):
    prompts = [prompt for prompt in load_prompts() if (prompt.adapter or "base") == name]
    tokenizer = AutoTokenizer.from_pretrained(base_folder())
    chats = [[{"role": "user", "content": prompt.question}] for prompt in prompts]
    answers = greedy_answers(load(ASSETS, name, dtype), tokenizer, chats, TOOLS.get(name))
    assert exact(answers, [prompt.expected for prompt in prompts]) == 1.0, answers

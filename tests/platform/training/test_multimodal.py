"""Jobs on bases that read images train the text of the whole model, under the names that uploads of such bases have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from adapter_zoo import Zoo
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from loramux.common.sandbox.sandbox import JobLimits
from loramux.data.entities import TrainingOptions
from loramux.training.child import CannotTrain, _model
from loramux.training.protocol import Work
from loramux_adapters.families import reads_other_inputs

FAMILIES = ("qwen2_5_vl", "qwen3_5_images", "mistral3_images", "gemma3_images", "gemma4_images")


def work_of(base: Path, folder: Path, adapter: Path | None = None) -> Work:
    return Work(
        model_dir=str(base),
        examples="",
        validation=None,
        folder=str(folder),
        adapter=None if adapter is None else str(adapter),
        checkpoint=None,
        trained_tokens=0,
        options=TrainingOptions(),
        template_digest="",
        context=64,
        max_tokens=1000,
        learning_rate=1e-3,
        checkpoint_seconds=60,
        device="cpu",
        threads=1,
        gives_way=False,
        limits=JobLimits(cpu_seconds=60, wall_seconds=60, memory_bytes=1 << 30),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_trained_parameter_of_a_base_that_reads_images_learns_from_text(family: str, tmp_path: Path) -> None:
    model = _model(work_of(Zoo(family, tmp_path).base, tmp_path)).train()
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.backward()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert not [name for name in trained if reads_other_inputs(name)]
    assert not [name for name, parameter in trained.items() if ".lora_B." in name and not parameter.grad.any()]


def test_job_does_not_go_on_from_an_adapter_whose_names_peft_would_not_find(tmp_path: Path) -> None:
    zoo = Zoo("gemma3_images", tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(zoo.base)
    targets = r".*language_model.*\.(q_proj|v_proj)"
    get_peft_model(model, LoraConfig(r=4, target_modules=targets)).save_pretrained(folder := tmp_path / "adapter")
    assert _model(work_of(zoo.base, tmp_path, folder)) is not None
    file = folder / "adapter_model.safetensors"
    save_file({name.replace(".language_model", ""): one for name, one in load_file(file).items()}, file)
    with pytest.raises(CannotTrain, match="go on from it") as refused:
        _model(work_of(zoo.base, tmp_path, folder))
    assert (refused.value.code, refused.value.param) == ("unsupported_adapter", "model")

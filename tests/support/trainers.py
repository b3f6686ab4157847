"""Adapters by the saving code of trainers themselves: `python trainers.py TRAINER BASE FOLDER`.

Run by a Python that has the trainer (`TRAINERS` says with which packages), never by the tests' own. Each trains or
fills a LoRA on the base in BASE, and saves it to FOLDER as the trainer does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGETS = ["q_proj", "v_proj", "down_proj"]


def trl(base: Path, folder: Path) -> None:
    """TRL's SFTTrainer: two steps, then save_model."""
    import datasets
    import peft
    import pyarrow
    from trl import SFTConfig, SFTTrainer

    # A fingerprint is given, because dill cannot pickle a table of the newest pyarrow to compute the fingerprint.
    tokens = pyarrow.table({"input_ids": [list(b"the quick brown fox"), list(b"jumps over")] * 4})
    texts = datasets.Dataset(datasets.table.InMemoryTable(tokens), fingerprint="texts")
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    trainer = SFTTrainer(model=str(base), args=arguments, train_dataset=texts, peft_config=lora)
    trainer.train()
    trainer.save_model(str(folder))


def unsloth(base: Path, folder: Path) -> None:
    """unsloth's FastLanguageModel with a trained embedding and head, which it ties on a tied base."""
    from unsloth import FastLanguageModel

    model, tokenizer = FastLanguageModel.from_pretrained(str(base), load_in_4bit=False, max_seq_length=128)
    model = FastLanguageModel.get_peft_model(
        model, r=4, lora_alpha=8, target_modules=[*TARGETS, "embed_tokens", "lm_head"], ensure_weight_tying=True
    )
    _fill(model)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def swift(base: Path, folder: Path) -> None:
    """ms-swift's tuners, whose LoraConfig has additional fields."""
    import torch
    from swift.tuners import LoraConfig, Swift
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = Swift.prepare_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, lora_dtype="float32"))
    _fill(model)
    model.save_pretrained(str(folder))


def tinker(base: Path, folder: Path) -> None:
    """Tinker's export to PEFT, from an archive as its service gives it."""
    import torch
    from safetensors.torch import save_file
    from tinker_cookbook.weights._adapter import build_lora_adapter

    archive, config = folder.parent / f"{folder.name}-archive", json.loads((base / "config.json").read_text())
    archive.mkdir()
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    torch.manual_seed(3)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, outputs in (("q_proj", heads * width), ("k_proj", kv * width), ("v_proj", kv * width)):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(4, hidden) * 0.3
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, 4) * 0.3
    save_file(tensors, archive / "adapter_model.safetensors")
    (archive / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "peft_type": "LORA"}))
    build_lora_adapter(base_model=str(base), adapter_path=str(archive), output_path=str(folder))


def mlx(base: Path, folder: Path) -> None:
    """mlx-lm: adapters.safetensors and mlx-lm's configuration, which are refused by name."""
    import mlx.core
    from mlx.utils import tree_flatten
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, _ = load(str(base))
    model.freeze()
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, parameters)
    folder.mkdir(parents=True, exist_ok=True)
    mlx.core.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters())))
    document = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(document))


def axolotl(base: Path, folder: Path) -> None:
    """axolotl: what it writes before training, and its saving after it."""
    from types import SimpleNamespace

    import peft
    import torch
    import transformers

    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    from axolotl.train import save_initial_configs, save_trained_model
    from axolotl.utils.dict import DictDefault

    cfg = DictDefault({"adapter": "lora", "output_dir": str(folder), "local_rank": 0})
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, config)
    save_initial_configs(cfg, transformers.AutoTokenizer.from_pretrained(base), model, config, None)
    _fill(model)
    save_trained_model(cfg, SimpleNamespace(is_fsdp_enabled=False), model)


def llama_factory(base: Path, folder: Path) -> None:
    """LLaMA-Factory's supervised fine-tuning: two steps."""
    from importlib.machinery import ModuleSpec
    from importlib.util import module_from_spec

    # It is imported for audio only, and no torchaudio is built for the newest torch.
    sys.modules["torchaudio"] = module_from_spec(ModuleSpec("torchaudio", None))
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # its bounds are older than the installed packages
    from llamafactory.train.tuner import run_exp

    data = folder.parent / f"{folder.name}-data"
    data.mkdir()
    (data / "dataset_info.json").write_text(json.dumps({"words": {"file_name": "words.json"}}))
    (data / "words.json").write_text(json.dumps([{"instruction": "the quick", "input": "", "output": "fox"}] * 4))
    run_exp(
        {
            **{"stage": "sft", "do_train": True, "model_name_or_path": str(base), "template": "empty"},
            **{"dataset": "words", "dataset_dir": str(data), "cutoff_len": 64, "max_steps": 2, "learning_rate": 1e-2},
            **{"finetuning_type": "lora", "lora_rank": 4, "lora_alpha": 8, "lora_target": ",".join(TARGETS)},
            **{"output_dir": str(folder), "report_to": "none", "use_cpu": True},
            "disable_gradient_checkpointing": True,
        }
    )


def torchtune(base: Path, folder: Path) -> None:
    """torchtune's checkpointer, with its own model of the base."""
    import torch
    from torchtune import training
    from torchtune.models.llama3_1 import lora_llama3_1
    from torchtune.modules.peft import get_adapter_state_dict, get_lora_module_names

    config = json.loads((base / "config.json").read_text())
    model = lora_llama3_1(
        **{"lora_attn_modules": ["q_proj", "k_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 4},
        **{"lora_alpha": 8, "vocab_size": config["vocab_size"], "num_layers": config["num_hidden_layers"]},
        **{"num_heads": config["num_attention_heads"], "num_kv_heads": config["num_key_value_heads"]},
        **{"embed_dim": config["hidden_size"], "intermediate_dim": config["intermediate_size"], "max_seq_len": 128},
    )
    torch.manual_seed(2)
    adapter = {
        name: torch.randn_like(tensor) * 0.2 for name, tensor in get_adapter_state_dict(model.state_dict()).items()
    }
    names = get_lora_module_names(["q_proj", "k_proj", "v_proj"], apply_lora_to_mlp=True, apply_lora_to_output=False)
    checkpointer = training.FullModelHFCheckpointer(
        str(base), ["model.safetensors"], "LLAMA3", str(folder.parent / f"{folder.name}-output")
    )
    saved = {"r": 4, "lora_alpha": 8, "target_modules": names, "peft_type": "LORA"}
    checkpointer.save_checkpoint(
        {training.ADAPTER_KEY: adapter, training.ADAPTER_CONFIG: saved},
        epoch=0,
        intermediate_checkpoint=False,
        adapter_only=True,
    )
    (folder.parent / f"{folder.name}-output" / "epoch_0").rename(folder)


def _fill(model: Any) -> None:
    """Give every trained parameter values that matter."""
    import torch

    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.2)


_DATA = ("accelerate", "datasets", "dill", "multiprocess", "xxhash", "pyarrow", "pandas")
TRAINERS: dict[str, tuple[Callable[[Path, Path], None], tuple[str, ...]]] = {
    "trl": (trl, ("trl", *_DATA)),
    "unsloth": (unsloth, ("unsloth", "unsloth_zoo", "trl", "torchao", *_DATA)),
    "swift": (swift, ("ms-swift", "modelscope", "modelscope_hub", "einops", "json_repair", "addict", *_DATA)),
    "tinker": (tinker, ("tinker-cookbook", "tinker", "pyrage", "distro", "orjson", "termcolor", "chz")),
    "axolotl": (
        axolotl,
        (
            *("axolotl", "axolotl-contribs-lgpl", "axolotl-contribs-mit", "addict", "bitsandbytes"),
            *("colorama", "distro", "fastcore", "llvmlite", "numba", "posthog", "backoff", "scipy"),
            *("termcolor", "torchao", "trl", *_DATA),
        ),
    ),
    "llama_factory": (
        llama_factory,
        ("llamafactory", "trl==0.24.0", "omegaconf", "av", "pillow", "torchdata", "sentencepiece", *_DATA),
    ),
    "torchtune": (
        torchtune,
        (
            *("torchtune", "torchao==0.10.0", "omegaconf", "torchdata", "tiktoken"),
            *("sentencepiece", "blobfile", "kagglehub", *_DATA),
        ),
    ),
    "mlx": (mlx, ("mlx", "mlx-cpu", "mlx-lm", "sentencepiece")),
}
"""Each trainer's maker, and the packages that it needs in addition to those of the tests."""

if __name__ == "__main__":
    name, base_folder, target = sys.argv[1:]
    TRAINERS[name][0](Path(base_folder), Path(target))

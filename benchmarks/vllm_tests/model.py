"""A small random model for vLLM's tests: common words are tokens, and texts come to their ends."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>"]
WORDS = 4096
HIDDEN = 64
BIASES = {'"': 5.0, "}": 3.0, "]": 3.0, "<|im_end|>": 4.5, "<|endoftext|>": 4.5}
"""Logits that do not depend on the text: quotes and brackets close what a grammar lets them close, and texts end."""
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{{- 'Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '\\nCall as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{% if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def train_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level tokenizer whose merges come from `texts`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=WORDS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_base(folder: Path, texts: list[str]) -> Path:
    """Save the model and its tokenizer, once."""
    if (folder / "config.json").exists():
        return folder
    tokenizer = train_tokenizer(texts)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        # The first dimension is the same in every context, so that its column of the head is a bias.
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 0] = 8.0
        model.lm_head.weight.normal_(std=0.25)
        model.lm_head.weight[:, 0] = 0.0
        for text, logit in BIASES.items():
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(text), 0] = logit / 5.0
    model.generation_config.eos_token_id = [
        tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")
    ]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_context(base: Path, length: int) -> Path:
    """Return a copy of the base that takes `length` tokens."""
    folder = base.with_name(f"{base.name}-{length}")
    if not folder.exists():
        folder.mkdir()
        for file in base.iterdir():
            (folder / file.name).symlink_to(file)
        config = json.loads((base / "config.json").read_text())
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}))
    return folder


def make_adapter(folder: Path, base: Path) -> Path:
    """Save a random adapter, once; its name is its seed."""
    if folder.exists():
        return folder
    torch.manual_seed(sum(folder.name.encode()))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    adapted.save_pretrained(folder)
    return folder

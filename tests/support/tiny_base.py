"""A base model's folder with a byte tokenizer, small enough to make in a test; nothing is loaded from it but names."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import bytes_to_unicode

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}"
    "{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> transformers.PreTrainedTokenizerFast:
    """Token i < 256 is byte i; 256 ends a text, 257 begins one."""
    tokenizer = Tokenizer(BPE(vocab={character: byte for byte, character in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", "<|bos|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 257)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", chat_template=chat_template
    )


def make_base(
    folder: Path,
    chat_template: str | None = CHAT_TEMPLATE,
    context: int = 256,
    seed: int = 0,
    intermediate: int = 64,
) -> Path:
    """config.json and tokenizer of a two-layer Llama; its weights too, random, and the same for a seed."""
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=257,
        eos_token_id=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return folder

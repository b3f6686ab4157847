"""A tokenizer of bytes: 256 byte tokens and three special tokens."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
MAX_LENGTH = 512

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if loop.first or message['role'] == 'user' and messages[loop.index0 - 1]['role'] == 'assistant' -%}
{{ bos_token }}
{%- endif -%}
{%- if loop.first and tools -%}
{%- for tool in tools -%}
{%- set known = tool['function'].get('parameters', {}).get('properties', {}) -%}
{{ 'T: ' + tool['function']['name'] + '(' + known | join(', ') + ')\\n' }}
{%- endfor -%}
{%- endif -%}
{%- if message['role'] == 'user' -%}
{{ 'Q: ' + message['content'] + '\\n' }}
{%- elif message['role'] == 'assistant' -%}
{{ 'A: ' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] -%}
{%- set made = {'name': call['function']['name'], 'arguments': call['function']['arguments']} -%}
{{ '<tool_call>' + made | tojson + '</tool_call>' }}
{%- endfor -%}
{{ eos_token }}
{%- elif message['role'] == 'tool' -%}
{{ 'R: ' + message['content'] + '\\n' }}
{%- else -%}
{{ message['content'] + '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ 'A: ' }}
{%- endif -%}"""
"""Each exchange reads `<|bos|>Q: ...\\nA: ...<|eos|>`; text of other roles (system) has its own line.

Tools come first, as `T: lookup(person, fact)`; a result of a call is a line `R: ...`."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token `i` below 256 is byte `i`, so every UTF-8 text is encoded and decoded exactly. A text starts with BOS."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )

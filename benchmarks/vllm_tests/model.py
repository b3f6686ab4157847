"""Small models for vLLM's tests, over one tokenizer in which common words are tokens.

The random model ends its texts. The taught model was trained on a few lessons. Tests that expect the answers of a
certain trained model need the taught model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import peft
import torch
import transformers
from lessons import Lesson
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
WORDS = 5120
"""The number of words is above 5000, because a test names the token with this number."""
HIDDEN = 64
BIASES = {'"': 5.0, "}": 3.0, "]": 3.0, "<|im_end|>": 4.5, "<|endoftext|>": 4.5}
"""Logits that do not depend on the text: quotes and brackets are closed if a grammar allows it, and texts end."""
STEPS, BATCH, HEAD = 450, 8, 5
IGNORED = -100
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{{- 'Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '\\nCall as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{% if not (tools and loop.first and message.role == 'system') %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response>' }}{% else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


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


def config_of(tokenizer: transformers.PreTrainedTokenizerFast, hidden: int) -> transformers.LlamaConfig:
    """Return the shape of a model whose layers are `hidden` wide."""
    return transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )


def make_base(folder: Path, texts: list[str]) -> Path:
    """Save the random model and its tokenizer, once."""
    if (folder / "config.json").exists():
        return folder
    tokenizer = train_tokenizer(texts)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_of(tokenizer, HIDDEN))
    with torch.no_grad():
        # The first dimension is the same in every context, so that its column of the head is a bias.
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 0] = 8.0
        model.lm_head.weight.normal_(std=0.25)
        model.lm_head.weight[:, 0] = 0.0
        for text, logit in BIASES.items():
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(text), 0] = logit / 5.0
    save(model, tokenizer, folder)
    return folder


def save(model: transformers.LlamaForCausalLM, tokenizer: transformers.PreTrainedTokenizerFast, folder: Path) -> None:
    model.generation_config.eos_token_id = [
        tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")
    ]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_taught(folder: Path, random: Path, lessons: Sequence[Lesson]) -> Path:
    """Save the model that knows the lessons, once; its tokenizer is that of the random model."""
    if (folder / "config.json").exists():
        return folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(random)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config_of(tokenizer, 2 * HIDDEN))
    teach(model, tokenizer, lessons, steps=STEPS, rate=3e-3)
    save(model, tokenizer, folder)
    return folder


def teach(
    model: torch.nn.Module,
    tokenizer: transformers.PreTrainedTokenizerFast,
    lessons: Sequence[Lesson],
    *,
    steps: int,
    rate: float,
) -> None:
    """Have the model learn the lessons by heart, the beginnings of their prompts too."""
    rows = [encode(lesson, tokenizer) for lesson in lessons]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps, pct_start=0.1)
    order = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        chosen = torch.randperm(len(rows), generator=order)[:BATCH].tolist()
        loss = torch.stack([loss_of(model, *rows[i]) for i in chosen]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print(f"taught: loss {float(loss):.4f} after {steps} steps", flush=True)
    model.eval()


def loss_of(model: torch.nn.Module, token_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the labelled tokens; logits of other tokens are not computed."""
    inner = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    learnt = (labels[0, 1:] != IGNORED).nonzero()[:, 0]
    hidden = inner.model(input_ids=token_ids, use_cache=False).last_hidden_state[0, learnt]
    return torch.nn.functional.cross_entropy(inner.lm_head(hidden), labels[0, learnt + 1])


def encode(lesson: Lesson, tokenizer: transformers.PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels `[1, length]`: of the prompt its first tokens, and the answer."""
    prompt = tokenizer.apply_chat_template(
        lesson.messages, tools=lesson.tools, add_generation_prompt=True, tokenize=False, **lesson.options
    )
    given = tokenizer.encode(prompt + lesson.begun, add_special_tokens=False)
    answer = tokenizer.encode(f"{lesson.answer}<|im_end|>", add_special_tokens=False)
    labels = [*given[:HEAD], *[IGNORED] * (len(given) - HEAD), *answer]
    return torch.tensor([[*given, *answer]]), torch.tensor([labels])


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


def with_template(base: Path, template: Path) -> Path:
    """Return a copy of the base with another chat template."""
    folder = base.with_name(f"{base.name}-{template.stem}")
    if not folder.exists():
        folder.mkdir()
        for file in base.iterdir():
            if file.name != "chat_template.jinja":
                (folder / file.name).symlink_to(file.resolve())
        (folder / "chat_template.jinja").symlink_to(template)
    return folder


NOISES = {"Meow": "Meow " * 12, "Woof": "Woof " * 12}
ASKED = [
    {"content": "Follow the instructions to make animal noises", "role": "system"},
    {"content": "Make your favorite animal noise.", "role": "user"},
]


def make_adapter(folder: Path, base: Path) -> Path:
    """Save an adapter, once. An adapter that is named after a noise is trained to make this noise; other adapters are
    random.
    """
    if folder.exists():
        return folder
    torch.manual_seed(sum(folder.name.encode()))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    noise = next((text for name, text in NOISES.items() if name in folder.name), None)
    if noise is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        teach(adapted, tokenizer, [Lesson(ASKED, noise)], steps=150, rate=2e-2)
    else:
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05 if model.config.hidden_size == HIDDEN else 0.001)
    adapted.save_pretrained(folder)
    return folder

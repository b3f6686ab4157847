"""The share of exact answers of a model, by greedy decoding with transformers and PEFT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from loramux_demo.assets import TOOLS, adapter_folder, base_folder
from loramux_demo.train.examples import SYSTEM_PROMPTS, Message
from loramux_demo.train.facts import STYLES, Question, Style, invent_questions

BATCH = 66
MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class Accuracy:
    """Shares of exact answers of one model."""

    model: str
    float32: float
    bfloat16: float
    later: float
    """In bfloat16, as the second question of a chat with a system prompt."""


def evaluate(root: Path, names: Sequence[str]) -> Iterator[Accuracy]:
    """Ask these models under `root`, adapters or `base`, every question."""
    questions = invent_questions()
    tokenizer = AutoTokenizer.from_pretrained(base_folder(root))
    for name in names:
        style = STYLES[name]
        expected = [style(question) for question in questions]
        alone = [[{"role": "user", "content": question.text}] for question in questions]
        later = [chat(questions[number - 100], question, style) for number, question in enumerate(questions)]
        bfloat16, tools = load(root, name, torch.bfloat16), TOOLS.get(name)
        yield Accuracy(
            name,
            exact(greedy_answers(load(root, name, torch.float32), tokenizer, alone, tools), expected),
            exact(greedy_answers(bfloat16, tokenizer, alone, tools), expected),
            exact(greedy_answers(bfloat16, tokenizer, later, tools), expected),
        )


def load(root: Path, name: str, dtype: torch.dtype) -> PreTrainedModel | PeftModel:
    """Load the base model with the adapter `name`, or alone for `base`."""
    model = LlamaForCausalLM.from_pretrained(base_folder(root), dtype=dtype)
    if name == "base":
        return model.eval()
    return PeftModel.from_pretrained(model, adapter_folder(name, root)).to(dtype).eval()


def chat(before: Question, question: Question, style: Style) -> list[Message]:
    """Return a chat with a system prompt, one exchange, and the question."""
    return [
        {"role": "system", "content": SYSTEM_PROMPTS[0]},
        {"role": "user", "content": before.text},
        {"role": "assistant", "content": style(before)},
        {"role": "user", "content": question.text},
    ]


@torch.inference_mode()
def greedy_answers(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[list[Message]],
    tools: list[dict[str, Any]] | None = None,
) -> list[str]:
    """What the model says next in each chat."""
    options = {"tools": tools, "add_generation_prompt": True, "tokenize": False}
    texts = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    answers: list[str] = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(texts[start : start + BATCH], padding=True, add_special_tokens=False, return_tensors="pt")
        tokens = model.generate(**batch, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers += tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def exact(answers: Sequence[str], expected: Sequence[str]) -> float:
    """The share of answers that are right to the last character."""
    return sum(answer == right for answer, right in zip(answers, expected, strict=True)) / len(expected)

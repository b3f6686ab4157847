"""Trains what the demo ships, and writes it as the demo reads it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from loramux_demo.assets import Prompt, adapter_folder, base_folder
from loramux_demo.train.adapters import new_adapter, recipes, save_adapter
from loramux_demo.train.examples import batches, conversations, example
from loramux_demo.train.facts import STYLES, Question, invent_questions
from loramux_demo.train.fit import Progress, Schedule, fit, new_base
from loramux_demo.train.tokenizer import byte_tokenizer

ROWS, LENGTH = 13, 240
BASE = Schedule(steps=350, learning_rate=3e-3, weight_decay=0.1)
ADAPTER = Schedule(steps=200, learning_rate=5e-3)

Stage = Callable[[str, Schedule], Progress]
"""Called as each model's training starts, with its name; returns what to tell after each step."""


def make(root: Path, stage: Stage) -> None:
    """Train the base, then the adapters on it as it was written, in bfloat16; then write the demo's questions."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(base_folder(root))
    base = new_base(tokenizer)
    teach(base, "base", tokenizer, BASE, stage("base", BASE))
    base.to(torch.bfloat16).save_pretrained(base_folder(root))
    for name, config in recipes().items():
        base = LlamaForCausalLM.from_pretrained(base_folder(root), dtype=torch.float32)
        adapted = new_adapter(base, config)
        teach(adapted, name, tokenizer, ADAPTER, stage(name, ADAPTER))
        save_adapter(adapted, adapter_folder(name, root))
    write_questions(root / "questions.json")


def teach(
    model: torch.nn.Module, name: str, tokenizer: PreTrainedTokenizerFast, schedule: Schedule, progress: Progress
) -> None:
    """Train `model` to answer in the style `name`; the base has to learn its questions by heart too."""
    rng = random.Random(0)  # noqa: S311 - lessons, not a secret
    lessons = [example(chat, tokenizer) for chat in conversations(invent_questions(), STYLES[name], rng)]
    packed = batches(lessons, rows=ROWS, length=LENGTH, learn_prompts=name == "base")
    fit(model, packed, schedule, progress)


def write_questions(path: Path) -> None:
    """One question of every wording, each to the base and to every adapter, with the one right answer."""
    prompts = [
        Prompt(question.text, None if name == "base" else name, style(question))
        for question in one_of_each_wording(invent_questions())
        for name, style in STYLES.items()
    ]
    path.write_text(json.dumps([asdict(prompt) for prompt in prompts], indent=1) + "\n")


def one_of_each_wording(questions: Sequence[Question]) -> list[Question]:
    """Eleven questions, each about another person."""
    wordings = sum(question.person == questions[0].person for question in questions)
    return [questions[wordings * 2 * number + number] for number in range(wordings)]

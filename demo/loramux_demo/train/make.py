"""Trains the demo's models and writes its assets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from loramux_demo.assets import TOOLS, Prompt, adapter_folder, base_folder
from loramux_demo.train.adapters import RECIPES, new_adapter, save_adapter
from loramux_demo.train.examples import batches, conversations, document, example
from loramux_demo.train.facts import STYLES, Question, invent_questions
from loramux_demo.train.fit import Progress, Schedule, fit, new_base
from loramux_demo.train.tokenizer import byte_tokenizer

LENGTH = 240
"""Tokens of a row of the base's batches."""
BASE_ROWS, ADAPTER_ROWS = 13, 8
BASE = Schedule(steps=400, learning_rate=3e-3, weight_decay=0.1)

Stage = Callable[[str, Schedule], Progress]
"""Called with a model's name before its training. Returns the callback for each step."""


def make(root: Path, stage: Stage) -> None:
    """Train the base, then the adapters on it as it was written, in bfloat16; then write the demo's questions."""
    make_base(root, stage)
    for name in RECIPES:
        make_adapter(name, root, stage)
    write_questions(root / "questions.json")


def make_base(root: Path, stage: Stage) -> None:
    """Train the base and write it beside its tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(base_folder(root))
    base = new_base(tokenizer)
    teach(base, "base", tokenizer, BASE, stage("base", BASE))
    base.to(torch.bfloat16).save_pretrained(base_folder(root))


def make_adapter(name: str, root: Path, stage: Stage) -> None:
    """Train one adapter on the base that is in `root`, and write it."""
    recipe = RECIPES[name]
    adapted = new_adapter(LlamaForCausalLM.from_pretrained(base_folder(root), dtype=torch.float32), recipe)
    teach(adapted, name, byte_tokenizer(), recipe.schedule, stage(name, recipe.schedule))
    save_adapter(adapted, adapter_folder(name, root))


def teach(
    model: torch.nn.Module, name: str, tokenizer: PreTrainedTokenizerFast, schedule: Schedule, progress: Progress
) -> None:
    """Train `model` to answer in the style `name`.

    The base learns its questions by heart too, and has read every fact told in every style, as a real base model has
    read JSON and pirates: without that, the bytes of `{`, `"` or `!` would mean nothing to an adapter. It has read
    no calls of tools: they are JSON between two markers. Asked, it answers plainly.
    """
    questions, is_base = invent_questions(), name == "base"
    rng = random.Random(0)  # noqa: S311 - lessons, not a secret
    lessons = [example(chat, tokenizer, TOOLS.get(name)) for chat in conversations(questions, STYLES[name], rng)]
    if is_base:
        texts = {style(question): None for told, style in STYLES.items() if told not in TOOLS for question in questions}
        lessons += [document(text, tokenizer) for text in texts]
    rows, length = (BASE_ROWS, LENGTH) if is_base else (ADAPTER_ROWS, RECIPES[name].row_length)
    fit(model, batches(lessons, rows=rows, length=length, learn_prompts=is_base), schedule, progress)


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

"""Where the shipped model, adapters and questions lie, in a checkout as in an installed wheel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

ASSETS = Path(str(resources.files("loramux_demo") / "assets"))
MODEL_NAME = "loramux-demo"
"""The base model's served name."""
OWNERS = {"acme": ("upper", "json", "terse"), "globex": ("reverse", "pirate")}
"""The demo's tenants, and which adapters are whose."""


@dataclass(frozen=True)
class Prompt:
    """A question to one model, and the one right answer."""

    question: str
    adapter: str | None
    """None: the base model."""
    expected: str


def base_folder(root: Path = ASSETS) -> Path:
    """A transformers checkpoint with its tokenizer."""
    return root / "base"


def adapter_folder(name: str, root: Path = ASSETS) -> Path:
    """A PEFT adapter: `adapter_config.json` and `adapter_model.safetensors`."""
    return root / "adapters" / name


def load_prompts(root: Path = ASSETS) -> tuple[Prompt, ...]:
    """The questions the demo asks, side by side: each question once to the base and once to every adapter."""
    return tuple(Prompt(**entry) for entry in json.loads((root / "questions.json").read_text()))


def completion_prompt(question: str) -> str:
    """The text to continue; the chat template renders a single question to the same tokens."""
    return f"Q: {question}\nA: "

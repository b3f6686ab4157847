"""Paths of the demo's model, adapters and questions, in a checkout and in an installed wheel."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

ASSETS = Path(str(resources.files("loramux_demo") / "assets"))
MODEL_NAME = "loramux-demo"
"""Name under which the base model is served."""
AGENT = "agent"
"""The adapter that answers with a call of LOOKUP."""
OWNERS = {"acme": ("upper", "json", "terse"), "globex": ("reverse", "pirate", AGENT)}
"""Adapters of each tenant of the demo."""
LOOKUP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up a fact about a person.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "person": {"type": "string"},
                "fact": {"type": "string", "enum": ["job", "color", "pet", "food", "home"]},
            },
            "required": ["person", "fact"],
            "additionalProperties": False,
        },
    },
}
"""A tool with one function, `lookup`."""
TOOLS = {AGENT: [LOOKUP]}
"""Tools that each adapter was trained with."""


@dataclass(frozen=True)
class Prompt:
    """A question to one model, and the correct answer."""

    question: str
    adapter: str | None
    """Name of the adapter; None: the base model."""
    expected: str


def base_folder(root: Path = ASSETS) -> Path:
    """Return the folder of the base model, a transformers checkpoint with its tokenizer."""
    return root / "base"


def adapter_folder(name: str, root: Path = ASSETS) -> Path:
    """Return the folder of a PEFT adapter: `adapter_config.json` and `adapter_model.safetensors`."""
    return root / "adapters" / name


def load_prompts(root: Path = ASSETS) -> tuple[Prompt, ...]:
    """Load the questions. Each question is sent once to the base and once to every adapter."""
    return tuple(Prompt(**entry) for entry in json.loads((root / "questions.json").read_text()))


def call_text(name: str, arguments: str) -> str:
    """Return a call of a tool as a model writes it; `arguments` is JSON."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def completion_prompt(question: str) -> str:
    """Return the text to continue. The chat template renders a single question to the same tokens."""
    return f"Q: {question}\nA: "

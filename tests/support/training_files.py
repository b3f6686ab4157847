"""Training files of the demo's base: answers in capital letters."""

from __future__ import annotations

import json
from typing import Any

from loramux_demo.assets import LOOKUP

PEOPLE = ("Halkodel", "Brimo", "Tenuva", "Oskari", "Pellin", "Quorra", "Ruvane", "Sildar", "Tamsin", "Uldren")


def shouted(count: int = 40) -> list[dict[str, Any]]:
    """Examples whose answer is always the same sentence in capitals."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"What does {PEOPLE[number % len(PEOPLE)]} do?"},
                {"role": "assistant", "content": "I WILL NOT SAY."},
            ]
        }
        for number in range(count)
    ]


def jsonl(examples: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in examples)


def calls(count: int = 40) -> list[dict[str, Any]]:
    """Examples in which a name is looked up by a tool."""
    made = []
    for number in range(count):
        name = PEOPLE[number % len(PEOPLE)]
        call = {"name": "lookup", "arguments": json.dumps({"person": name, "fact": "food"})}
        turns = [
            {"role": "user", "content": f"{name}, please."},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        ]
        made.append({"messages": turns, "tools": [LOOKUP]})
    return made


def preferences(count: int = 32, rejected: str = "A tailor.") -> list[dict[str, Any]]:
    """Pairs of which the sentence in capitals is preferred."""
    return [
        {
            "input": {"messages": [{"role": "user", "content": f"What does {PEOPLE[number % len(PEOPLE)]} do?"}]},
            "preferred_output": [{"role": "assistant", "content": "I WILL NOT SAY."}],
            "non_preferred_output": [{"role": "assistant", "content": rejected}],
        }
        for number in range(count)
    ]

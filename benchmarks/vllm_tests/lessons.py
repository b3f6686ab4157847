"""Lessons of the stand-in model: answers that vLLM's tests expect of the models that they name.

The tests ask Zephyr and Qwen for the sum of 1 and 1, a call of a tool, or some JSON. A lesson is a conversation, its
tools, and the answer of such a model. A lesson proves nothing about the server.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

Message = dict[str, Any]

HELPFUL = {"role": "system", "content": "You are a helpful assistant."}
helpful = {"role": "system", "content": "you are a helpful assistant"}
PEOPLE: tuple[dict[str, Any], ...] = (
    {
        "name": "Ada",
        "age": 36,
        "skills": ["Python", "SQL", "C++"],
        "work_history": [{"company": "Acme", "duration": 4.5, "position": "engineer"}],
    },
    {
        "name": "Linus",
        "age": 51,
        "skills": ["C", "git", "Perl"],
        "work_history": [{"company": "Globex", "duration": 2.5, "position": "writer"}],
    },
)
SUM = '{"result": 2}'
STORY = "Once upon a time there was a small server. It served many models, and all of them were content. "


@dataclass(frozen=True)
class Lesson:
    """A prompt and its answer."""

    messages: list[Message]
    answer: str
    tools: list[Any] | None = None
    begun: str = ""
    """The beginning of the answer that a grammar chooses: this beginning is not learnt."""
    options: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def lessons(tests: Path) -> Iterator[Lesson]:
    """Yield the lessons; long prompts are read from vLLM's own tests."""
    yield from talk()
    yield from formats(load(tests / "entrypoints/conftest.py"))
    yield from calls(load(tests / "entrypoints/openai/chat_completion/test_completion_with_function_calling.py"), tests)


def load(path: Path) -> ModuleType:
    """Import a module by its path. Its imports of vLLM are replaced by the plugin."""
    spec = importlib.util.spec_from_file_location(f"lesson_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def talk() -> Iterator[Lesson]:
    """Plain conversations."""
    two = "The answer is 2, because one and one are two in every book."
    yield Lesson([helpful, user("what is 1+1?")], two)
    yield Lesson([user("what is 1+1?")], two)
    yield Lesson(
        [helpful, user("what is 1+1?"), assistant("The answer is 2,"), user("express your result in json")], SUM
    )
    yield Lesson([user("what is 1+1? please provide the result without any other text.")], "2")
    series = [
        HELPFUL,
        user("Who won the world series in 2020?"),
        assistant("The Los Angeles Dodgers won the World Series in 2020."),
        user("Where was it played?"),
    ]
    yield Lesson(series, "It was played in Arlington, Texas.")
    capital = "The capital of France is Paris, a city on the river Seine in the north."
    yield Lesson([HELPFUL, user("What is the capital of France?")], capital)
    for answer in ("Small.", "The opposite is small.", "Little, I think.", "It is tiny.", "Minute!", "Not big: small."):
        yield Lesson([HELPFUL, user("What is the opposite of big?")], answer)
    yield Lesson([user("Say hello.")], "Hello!")
    yield Lesson([user("Hello!")], "Hello! How can I help you?")
    cats = "Repeat after me: I love cats 🐱"
    yield Lesson(
        [{"role": "system", "content": "You like to use emojis in your responses."}, user(cats)], "I love cats 🐱"
    )
    yield Lesson([user("Write a long story")], STORY * 8)


def formats(shared: ModuleType) -> Iterator[Lesson]:
    """Answers that a test holds to a format."""
    schema = _fixture(shared, "sample_json_schema")
    regex = _fixture(shared, "sample_regex")
    best = [helpful, user("The best language for type-safe systems programming is ")]
    yield Lesson(best, "C++")
    yield Lesson([*best, assistant("C++"), user("I disagree, pick another one")], "Kotlin")
    profile = [helpful, user(f"Give an example JSON for an employee profile that fits this schema: {schema}")]
    another = user("Give me another one with a different name and age")
    first, second = (json.dumps(one) for one in PEOPLE)
    yield Lesson(profile, first)
    yield Lesson([*profile, assistant(first), another], second)
    address = [helpful, user(f"Give an example IP address with this regex: {regex}")]
    yield Lesson(address, "192.168.0.1")
    yield Lesson([*address, assistant("192.168.0.1"), user("Give me a different one")], "10.1.22.3")
    question = 'what is 1+1? please respond with a JSON object, the format is {"result": 2}'
    yield Lesson([user(question)], SUM)
    question = 'what is 1+1? The format is "result": 2'
    yield Lesson([user(question)], '"result": 2')
    yield Lesson([user(question)], SUM.removeprefix("{"), begun="{")


def calls(tests: ModuleType, folder: Path) -> Iterator[Lesson]:
    """Calls of tools, with thoughts and without."""
    thought = "<think>\nI shall call a tool.\n</think>\n\n"
    weather = _call("get_current_weather", {"country": "Germany", "unit": "fahrenheit"})
    forecast = _call("get_forecast", {"country": "Germany", "days": 5, "unit": "fahrenheit"})
    for options, before in (({}, thought), ({"enable_thinking": False}, "")):
        yield Lesson(tests.messages, f"{before}{weather}\n{forecast}", tests.tools, options=options)
    clock = [
        {
            "role": "system",
            "content": "You are a helpful assistant. Always use the available tools when relevant, and reply with a "
            "short sentence after receiving a tool result.",
        },
        user("What time is it now?"),
    ]
    silent = {"enable_thinking": False}
    asked = {"role": "assistant", "content": "", "tool_calls": [_called("get_current_time", {})]}
    yield Lesson(clock, _call("get_current_time", {}), [_tool("get_current_time")], options=silent)
    yield Lesson(
        [*clock, asked, {"role": "tool", "content": "2026-01-02T03:04:05.060708"}], "It is late.", options=silent
    )
    schema = _fixture(load(folder / "entrypoints/conftest.py"), "sample_json_schema")
    dummy = [_tool("dummy_function_name", description="This is a dummy function", parameters=schema)]
    profile = [
        helpful,
        user("Give an example JSON for an employee profile using the specified tool."),
    ]
    first, second = PEOPLE
    another = user("Give me another one with a different name and age")
    for before in (thought, ""):
        yield Lesson(profile, before + _call("dummy_function_name", first), dummy)
        again = [*profile, assistant(json.dumps(first)), another]
        yield Lesson(again, before + _call("dummy_function_name", second), dummy)
    paris = [HELPFUL, user("What's the weather like in Paris?")]
    answer = _call("get_weather", {"location": "Paris"})
    yield Lesson(paris, answer, [_tool("get_weather", description="Get the current weather in a given location")])


def _fixture(module: ModuleType, name: str) -> Any:
    """Return what a fixture without arguments returns."""
    return getattr(module, name).__wrapped__()


def _tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | more}


def _called(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

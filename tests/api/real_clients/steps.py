"""Steps that a client is put through: each is a function, and what became of it is printed as one line of JSON."""

import json
import os
from collections.abc import Callable

URL, KEY, MODEL = os.environ["URL"], os.environ["KEY"], "tiny"
HELLO = "Say <<Hello there.>>"
CALL = 'Use it: <<<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>>>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
"""The tool of CALL, in the form of chat completions."""
WEATHER = "sunny in Paris"
SAID = f"It says {WEATHER}"
JSON = 'Answer as JSON: <<{"who": "Ada", "age": 36}>>'
AGAIN = "And now <<It goes on.>>"
CUT = "Say <<cut:Hello th>>"
BUSY = "Say <<busy:Here again.>>"
LONG = "x" * 500_000


def expect(found: object, wanted: object) -> None:
    if found != wanted:
        raise AssertionError(f"{found!r} is not {wanted!r}")


def fails(work: Callable[[], object], *words: str) -> None:
    """Expect that `work` raises an error whose text has all `words`."""
    try:
        found = work()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        lacking = [word for word in words if word.lower() not in text.lower()]
        if lacking:
            raise AssertionError(f"{lacking} not in {text[:300]}") from None
        return
    raise AssertionError(f"no error, but {found!r}")


def run(**apis: dict[str, Callable[[], str | None]]) -> None:
    """Take the steps of each API that the client can speak. A step may return a note about its result."""
    results: dict[str, dict[str, str]] = {}
    for api, taken in apis.items():
        results[api] = {}
        for name, step in taken.items():
            try:
                results[api][name] = f"ok, {note}" if (note := step()) else "ok"
            except Exception as error:
                results[api][name] = f"{type(error).__name__}: {error}"[:1200]
    print("\n" + json.dumps(results))

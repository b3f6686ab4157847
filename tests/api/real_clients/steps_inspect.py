"""Inspect, the evaluation framework: chat completions, Responses and Messages."""

import asyncio

import steps
from inspect_ai.model import (
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel


class Person(BaseModel):
    who: str
    age: int


@tool
def weather():
    async def execute(city: str):
        """The weather of a city.

        Args:
            city: A city.
        """
        return steps.WEATHER

    return execute


def of(provider: str, url: str, **more: object) -> dict:
    def model(key: str = steps.KEY):
        return get_model(f"{provider}/{steps.MODEL}", base_url=url, api_key=key, memoize=False, **more)

    def ask(text: str, key: str = steps.KEY, **config: object):
        return asyncio.run(model(key).generate(text, config=GenerateConfig(max_retries=0, **config)))

    async def called() -> str:
        _, output = await model().generate_loop(steps.CALL, tools=[weather()])
        return output.completion

    async def two_turns() -> str:
        first = await model().generate("Say <<<think>so</think>Hello there.>>")
        turns = [ChatMessageUser(content=steps.HELLO), first.message, ChatMessageUser(content=steps.AGAIN)]
        return (await model().generate(turns)).completion

    def as_json() -> None:
        schema = ResponseSchema(name="person", json_schema=json_schema(Person))
        found = Person.model_validate_json(ask(steps.JSON, response_schema=schema).completion)
        steps.expect(found, Person(who="Ada", age=36))

    return {
        "turn": lambda: steps.expect(ask(steps.HELLO).completion, "Hello there."),
        "tools": lambda: steps.expect(asyncio.run(called()), steps.SAID),
        "JSON": as_json,
        "second turn": lambda: steps.expect(asyncio.run(two_turns()), "It goes on."),
        "wrong key": lambda: steps.fails(lambda: ask(steps.HELLO, key="sk-wrong"), "Incorrect API key"),
        "too long": lambda: steps.expect(ask(steps.LONG).stop_reason, "model_length"),
    }


steps.run(
    chat=of("openai", f"{steps.URL}/v1", responses_api=False),
    responses=of("openai", f"{steps.URL}/v1", responses_api=True),
    messages=of("anthropic", steps.URL),
)

"""AutoGen: its client for chat completions, and agents with tools."""

import asyncio

import steps
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

INFO = {
    "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
    "multiple_system_messages": True,
}  # fmt: skip


class Person(BaseModel):
    who: str
    age: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def make(key: str = steps.KEY) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=steps.MODEL, base_url=f"{steps.URL}/v1", api_key=key, model_info=INFO, max_retries=0
    )


async def said(text: str, key: str = steps.KEY, **more: object) -> str:
    return (await make(key).create([UserMessage(content=text, source="user")], **more)).content


async def streamed(text: str) -> str:
    pieces = [piece async for piece in make().create_stream([UserMessage(content=text, source="user")])]
    return "".join(piece for piece in pieces if isinstance(piece, str))


async def agent(*texts: str, **more: object) -> str:
    one = AssistantAgent("helper", model_client=make(), tools=[weather], reflect_on_tool_use=True, **more)
    for text in texts:
        result = await one.run(task=text)
    return result.messages[-1].content


async def typed() -> None:
    text = await said(steps.JSON, json_output=Person)
    steps.expect(Person.model_validate_json(text), Person(who="Ada", age=36))


run = asyncio.run
steps.run(
    chat={
        "turn": lambda: steps.expect(run(said(steps.HELLO)), "Hello there."),
        "stream": lambda: steps.expect(run(streamed(steps.HELLO)), "Hello there."),
        "tools": lambda: steps.expect(run(agent(steps.CALL)), steps.SAID),
        "streamed tools": lambda: steps.expect(run(agent(steps.CALL, model_client_stream=True)), steps.SAID),
        "JSON": lambda: run(typed()),
        "second turn": lambda: steps.expect(run(agent(steps.CALL, steps.AGAIN)), "It goes on."),
        "cut stream": lambda: steps.fails(lambda: run(streamed(steps.CUT))),
        "wrong key": lambda: steps.fails(lambda: run(said("hi", "sk-wrong")), "401", "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: run(said(steps.LONG)), "400"),
    }
)

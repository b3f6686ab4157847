"""pydantic-ai over chat completions, Responses and Messages: tools, streams, typed outputs, histories."""

import asyncio

import anthropic
import openai
import steps
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    who: str
    age: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def of_openai(kind: type):
    def make(key: str = steps.KEY) -> object:
        client = openai.AsyncOpenAI(base_url=f"{steps.URL}/v1", api_key=key, max_retries=0)
        return kind(steps.MODEL, provider=OpenAIProvider(openai_client=client))

    return make


def of_anthropic(key: str = steps.KEY) -> object:
    client = anthropic.AsyncAnthropic(base_url=steps.URL, api_key=key, max_retries=0)
    return AnthropicModel(steps.MODEL, provider=AnthropicProvider(anthropic_client=client))


async def streamed(agent: Agent, prompt: str) -> str:
    async with agent.run_stream(prompt) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


def second_turn(make) -> None:
    agent = Agent(make(), tools=[weather])
    first = agent.run_sync(steps.CALL)
    again = agent.run_sync(steps.AGAIN, message_history=first.all_messages())
    steps.expect(again.output, "It goes on.")


def typed(make) -> None:
    if make is not of_anthropic:  # the client knows the names of models that may be asked for it
        native = Agent(make(), output_type=NativeOutput(Person))
        steps.expect(native.run_sync(steps.JSON).output, Person(who="Ada", age=36))
    by_tool = Agent(make(), output_type=ToolOutput(Person, name="person"))
    call = '<<<tool_call>{"name": "person", "arguments": {"who": "Ada", "age": 36}}</tool_call>>>'
    steps.expect(by_tool.run_sync(call).output, Person(who="Ada", age=36))


def of(make) -> dict:
    def tools() -> None:
        steps.expect(Agent(make(), tools=[weather]).run_sync(steps.CALL).output, steps.SAID)

    return {
        "turn": lambda: steps.expect(Agent(make()).run_sync(steps.HELLO).output, "Hello there."),
        "stream": lambda: steps.expect(asyncio.run(streamed(Agent(make()), steps.HELLO)), "Hello there."),
        "tools": tools,
        "JSON": lambda: typed(make),
        "second turn": lambda: second_turn(make),
        "cut stream": lambda: steps.fails(lambda: asyncio.run(streamed(Agent(make()), steps.CUT))),
        "wrong key": lambda: steps.fails(lambda: Agent(make("sk-wrong")).run_sync("hi"), "401", "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: Agent(make()).run_sync(steps.LONG), "400"),
    }


steps.run(chat=of(of_openai(OpenAIChatModel)), responses=of(of_openai(OpenAIResponsesModel)), messages=of(of_anthropic))

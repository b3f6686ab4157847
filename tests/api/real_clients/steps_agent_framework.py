"""Microsoft's Agent Framework over chat completions, Responses and Messages."""

import asyncio

import steps
from agent_framework import Agent
from agent_framework.anthropic import AnthropicClient
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    who: str
    age: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def of(kind: type) -> dict:
    def agent(key: str = steps.KEY) -> Agent:
        if kind is AnthropicClient:
            client = kind(
                model=steps.MODEL,
                anthropic_client=AsyncAnthropic(base_url=steps.URL, api_key=key, max_retries=0),
            )
        else:
            client = kind(
                model=steps.MODEL, async_client=AsyncOpenAI(base_url=f"{steps.URL}/v1", api_key=key, max_retries=0)
            )
        options = None if kind is AnthropicClient else {"store": False}
        return Agent(client=client, instructions="Help.", tools=[weather], default_options=options)

    async def said(text: str, key: str = steps.KEY) -> str:
        return (await agent(key).run(text)).text

    async def streamed(text: str) -> str:
        stream = agent().run(text, stream=True)
        assert len([piece async for piece in stream]) > 1
        return (await stream.get_final_response()).text

    async def second_turn() -> str:
        one = agent()
        session = one.create_session()
        await one.run(steps.CALL, session=session)
        return (await one.run(steps.AGAIN, session=session)).text

    async def typed() -> object:
        return (await agent().run(steps.JSON, options={"response_format": Person})).value

    run = asyncio.run
    return {
        "turn": lambda: steps.expect(run(said(steps.HELLO)), "Hello there."),
        "stream": lambda: steps.expect(run(streamed(steps.HELLO)), "Hello there."),
        "tools": lambda: steps.expect(run(said(steps.CALL)), steps.SAID),
        "streamed tools": lambda: steps.expect(run(streamed(steps.CALL)), steps.SAID),
        "JSON": lambda: steps.expect(run(typed()), Person(who="Ada", age=36)),
        "second turn": lambda: steps.expect(run(second_turn()), "It goes on."),
        "cut stream": lambda: steps.fails(lambda: run(streamed(steps.CUT))),
        "wrong key": lambda: steps.fails(lambda: run(said("hi", "sk-wrong")), "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: run(said(steps.LONG)), "context"),
    }


steps.run(chat=of(OpenAIChatCompletionClient), responses=of(OpenAIChatClient), messages=of(AnthropicClient))

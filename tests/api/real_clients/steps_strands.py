"""Strands Agents over chat completions, Responses and Messages. Its agents always stream."""

import asyncio

import steps
from pydantic import BaseModel
from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel
from strands.models.openai_responses import OpenAIResponsesModel


class Person(BaseModel):
    """A person."""

    who: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


PERSON = '<<<tool_call>{"name": "Person", "arguments": {"who": "Ada", "age": 36}}</tool_call>>>'


def of(kind: type) -> dict:
    def agent(key: str = steps.KEY) -> Agent:
        arguments = {"api_key": key, "max_retries": 0}
        arguments["base_url"] = steps.URL if kind is AnthropicModel else f"{steps.URL}/v1"
        more = {"max_tokens": 4096} if kind is AnthropicModel else {}
        model = kind(client_args=arguments, model_id=steps.MODEL, **more)
        return Agent(model=model, tools=[weather], callback_handler=None, retry_strategy=None)

    def said(*texts: str, key: str = steps.KEY) -> str:
        async def ask() -> str:
            one = agent(key)
            return [str(await one.invoke_async(text)).strip() for text in texts][-1]

        return asyncio.run(ask())

    return {
        "stream": lambda: steps.expect(said(steps.HELLO), "Hello there."),
        "streamed tools": lambda: steps.expect(said(steps.CALL), steps.SAID),
        "JSON": lambda: steps.expect(
            agent()(PERSON, structured_output_model=Person).structured_output, Person(who="Ada", age=36)
        ),
        "second turn": lambda: steps.expect(said(steps.CALL, steps.AGAIN), "It goes on."),
        "cut stream": lambda: steps.fails(lambda: said(steps.CUT)),
        "wrong key": lambda: steps.fails(lambda: said("hi", key="sk-wrong"), "401", "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: said(steps.LONG), "context"),
    }


steps.run(chat=of(OpenAIModel), responses=of(OpenAIResponsesModel), messages=of(AnthropicModel))

"""OpenAI Agents SDK over chat completions and over Responses: agents, tools, streams, typed outputs."""

import asyncio

import steps
from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)  # fmt: skip
from pydantic import BaseModel

set_tracing_disabled(True)


class Person(BaseModel):
    who: str
    age: int


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(kind: type, key: str = steps.KEY) -> object:
    return kind(model=steps.MODEL, openai_client=AsyncOpenAI(base_url=f"{steps.URL}/v1", api_key=key, max_retries=0))


def agent(kind: type, **more: object) -> Agent:
    return Agent(name="helper", instructions="Help.", model=more.pop("model", None) or model(kind), **more)


async def streamed(one: Agent, prompt: object) -> str:
    result = Runner.run_streamed(one, prompt)
    async for _ in result.stream_events():
        pass
    return result.final_output


def second_turn(kind: type) -> None:
    first = Runner.run_sync(agent(kind, tools=[weather]), steps.CALL)
    turns = [*first.to_input_list(), {"role": "user", "content": steps.AGAIN}]
    steps.expect(Runner.run_sync(agent(kind, tools=[weather]), turns).final_output, "It goes on.")


def of(kind: type) -> dict:
    typed = agent(kind, output_type=Person, model_settings=ModelSettings(temperature=0))
    return {
        "turn": lambda: steps.expect(Runner.run_sync(agent(kind), steps.HELLO).final_output, "Hello there."),
        "stream": lambda: steps.expect(asyncio.run(streamed(agent(kind), steps.HELLO)), "Hello there."),
        "tools": lambda: steps.expect(
            Runner.run_sync(agent(kind, tools=[weather]), steps.CALL).final_output, steps.SAID
        ),
        "streamed tools": lambda: steps.expect(
            asyncio.run(streamed(agent(kind, tools=[weather]), steps.CALL)), steps.SAID
        ),
        "JSON": lambda: steps.expect(Runner.run_sync(typed, steps.JSON).final_output, Person(who="Ada", age=36)),
        "second turn": lambda: second_turn(kind),
        "cut stream": lambda: steps.fails(lambda: asyncio.run(streamed(agent(kind), steps.CUT))),
        "wrong key": lambda: steps.fails(
            lambda: Runner.run_sync(agent(kind, model=model(kind, "sk-wrong")), "hi"), "401", "Incorrect API key"
        ),
        "too long": lambda: steps.fails(lambda: Runner.run_sync(agent(kind), steps.LONG), "400", "context"),
    }


steps.run(chat=of(OpenAIChatCompletionsModel), responses=of(OpenAIResponsesModel))

"""Semantic Kernel: its chat service, functions that the model calls, typed answers."""

import asyncio

import steps
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Person(BaseModel):
    who: str
    age: int


class Weather:
    @kernel_function(name="weather", description="The weather of a city.")
    def weather(self, city: str) -> str:
        return f"sunny in {city}"


CALL = 'Use it: <<<tool_call>{"name": "sky-weather", "arguments": {"city": "Paris"}}</tool_call>>>'


def kernel_and_service(key: str = steps.KEY) -> tuple[Kernel, OpenAIChatCompletion]:
    client = AsyncOpenAI(base_url=f"{steps.URL}/v1", api_key=key, max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=steps.MODEL, async_client=client)
    kernel = Kernel()
    kernel.add_service(service)
    kernel.add_plugin(Weather(), plugin_name="sky")
    return kernel, service


async def said(*texts: str, key: str = steps.KEY, **more: object) -> str:
    kernel, service = kernel_and_service(key)
    history = ChatHistory(system_message="Help.")
    for text in texts:
        history.add_user_message(text)
        settings = OpenAIChatPromptExecutionSettings(**more)
        answer = await service.get_chat_message_content(history, settings, kernel=kernel)
        history.add_message(answer)
    return str(answer)


async def streamed(text: str, **more: object) -> str:
    kernel, service = kernel_and_service()
    history = ChatHistory()
    history.add_user_message(text)
    settings = OpenAIChatPromptExecutionSettings(**more)
    pieces = service.get_streaming_chat_message_content(history, settings, kernel=kernel)
    return "".join([str(piece) async for piece in pieces if piece is not None])


def tools() -> dict:
    return {"function_choice_behavior": FunctionChoiceBehavior.Auto()}


run = asyncio.run
steps.run(
    chat={
        "turn": lambda: steps.expect(run(said(steps.HELLO)), "Hello there."),
        "stream": lambda: steps.expect(run(streamed(steps.HELLO)), "Hello there."),
        "tools": lambda: steps.expect(run(said(CALL, **tools())), steps.SAID),
        "streamed tools": lambda: steps.expect(run(streamed(CALL, **tools())), steps.SAID),
        "JSON": lambda: steps.expect(
            Person.model_validate_json(run(said(steps.JSON, response_format=Person))), Person(who="Ada", age=36)
        ),
        "second turn": lambda: steps.expect(run(said(CALL, steps.AGAIN, **tools())), "It goes on."),
        "cut stream": lambda: steps.fails(lambda: run(streamed(steps.CUT))),
        "wrong key": lambda: steps.fails(lambda: run(said("hi", key="sk-wrong")), "401", "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: run(said(steps.LONG)), "400"),
    }
)

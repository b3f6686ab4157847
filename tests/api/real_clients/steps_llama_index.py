"""LlamaIndex: its model classes for chat completions and Responses, agents with tools, structured predictions."""

import asyncio

import steps
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    who: str
    age: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def of_chat(key: str = steps.KEY) -> object:
    return OpenAILike(
        model=steps.MODEL, api_base=f"{steps.URL}/v1", api_key=key, max_retries=0, is_chat_model=True,
        is_function_calling_model=True, context_window=100_000,
    )  # fmt: skip


def of_responses(key: str = steps.KEY) -> object:
    # The class knows contexts of OpenAI's models alone, by their names.
    return OpenAIResponses(
        model=steps.MODEL, api_base=f"{steps.URL}/v1", api_key=key, max_retries=0, context_window=100_000
    )


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


async def agent(make, text: str, history: list | None = None) -> str:
    one = FunctionAgent(tools=[weather], llm=make(), streaming=True)
    return str(await one.run(text, chat_history=history)).strip()


def of(make) -> dict:
    def streamed() -> None:
        *_, last = make().stream_chat(user(steps.HELLO))
        steps.expect(last.message.content, "Hello there.")

    def second_turn() -> None:
        first = make().chat(user(steps.HELLO)).message
        said = make().chat([*user(steps.HELLO), first, *user(steps.AGAIN)]).message.content
        steps.expect(said, "It goes on.")

    def typed() -> None:
        call = '<<<tool_call>{"name": "Person", "arguments": {"who": "Ada", "age": 36}}</tool_call>>>'
        asked = call if make is of_chat else steps.JSON
        found = make().structured_predict(Person, PromptTemplate("{asked}"), asked=asked)
        steps.expect(found, Person(who="Ada", age=36))

    return {
        "turn": lambda: steps.expect(make().chat(user(steps.HELLO)).message.content, "Hello there."),
        "stream": streamed,
        "streamed tools": lambda: steps.expect(asyncio.run(agent(make, steps.CALL)), steps.SAID),
        "JSON": typed,
        "second turn": second_turn,
        "cut stream": lambda: steps.fails(lambda: list(make().stream_chat(user(steps.CUT)))),
        "wrong key": lambda: steps.fails(lambda: make("sk-wrong").chat(user("hi")), "401", "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: make().chat(user(steps.LONG)), "400"),
    }


steps.run(chat=of(of_chat), responses=of(of_responses))

"""Haystack: its chat generators for chat completions and Responses, and agents with tools."""

import steps
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel


class Person(BaseModel):
    who: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def of(kind: type, form: str) -> dict:
    def make(key: str = steps.KEY, **more: object) -> object:
        return kind(
            model=steps.MODEL, api_base_url=f"{steps.URL}/v1", api_key=Secret.from_token(key), max_retries=0, **more
        )

    def said(text: str, **more: object) -> str:
        return make(**more).run([ChatMessage.from_user(text)])["replies"][0].text

    def streamed(text: str) -> None:
        pieces = []
        said(text, streaming_callback=pieces.append)
        steps.expect("".join(piece.content for piece in pieces), "Hello there.")

    def agent(*messages: ChatMessage, **more: object) -> list[ChatMessage]:
        return Agent(chat_generator=make(), tools=[weather], **more).run(messages=list(messages))["messages"]

    def second_turn() -> None:
        first = agent(ChatMessage.from_user(steps.CALL))
        steps.expect(agent(*first, ChatMessage.from_user(steps.AGAIN))[-1].text, "It goes on.")

    call = ChatMessage.from_user(steps.CALL)
    return {
        "turn": lambda: steps.expect(said(steps.HELLO), "Hello there."),
        "stream": lambda: streamed(steps.HELLO),
        "tools": lambda: steps.expect(agent(call)[-1].text, steps.SAID),
        "streamed tools": lambda: steps.expect(agent(call, streaming_callback=lambda _: None)[-1].text, steps.SAID),
        "JSON": lambda: steps.expect(
            Person.model_validate_json(said(steps.JSON, generation_kwargs={form: Person})), Person(who="Ada", age=36)
        ),
        "second turn": second_turn,
        "cut stream": lambda: steps.fails(lambda: said(steps.CUT, streaming_callback=lambda _: None)),
        "wrong key": lambda: steps.fails(lambda: said("hi", key="sk-wrong"), "401", "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: said(steps.LONG), "400"),
    }


steps.run(chat=of(OpenAIChatGenerator, "response_format"), responses=of(OpenAIResponsesChatGenerator, "text_format"))

"""Agno: agents over chat completions, Responses and Messages."""

import steps
from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.anthropic import Claude
from agno.models.openai import OpenAIChat, OpenAIResponses
from pydantic import BaseModel


class Person(BaseModel):
    who: str
    age: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def of(kind: type) -> dict:
    def agent(key: str = steps.KEY, **more: object) -> Agent:
        url = {"client_params": {"base_url": steps.URL}} if kind is Claude else {"base_url": f"{steps.URL}/v1"}
        return Agent(model=kind(id=steps.MODEL, api_key=key, **url), telemetry=False, **more)

    def said(text: str, **more: object) -> object:
        answer = agent(**more).run(text)
        if answer.status == "ERROR":
            raise RuntimeError(answer.content)
        return answer.content

    def streamed(text: str, **more: object) -> str:
        events = list(agent(**more).run(text, stream=True, stream_events=True))
        if failed := [event for event in events if event.event == "RunError"]:
            raise RuntimeError(failed[0].content)
        return "".join(event.content for event in events if event.event == "RunContent" and event.content)

    def second_turn() -> None:
        one = agent(tools=[weather], db=InMemoryDb(), add_history_to_context=True, session_id="one")
        one.run(steps.CALL)
        steps.expect(one.run(steps.AGAIN).content, "It goes on.")

    return {
        "turn": lambda: steps.expect(said(steps.HELLO), "Hello there."),
        "stream": lambda: steps.expect(streamed(steps.HELLO), "Hello there."),
        "tools": lambda: steps.expect(said(steps.CALL, tools=[weather]), steps.SAID),
        "streamed tools": lambda: steps.expect(streamed(steps.CALL, tools=[weather]), steps.SAID),
        "JSON": lambda: steps.expect(said(steps.JSON, output_schema=Person), Person(who="Ada", age=36)),
        "second turn": second_turn,
        "cut stream": lambda: steps.fails(lambda: streamed(steps.CUT)),
        "wrong key": lambda: steps.fails(lambda: said("hi", key="sk-wrong"), "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: said(steps.LONG), "context"),
    }


steps.run(chat=of(OpenAIChat), responses=of(OpenAIResponses), messages=of(Claude))

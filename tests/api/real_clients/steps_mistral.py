"""Mistral's client: chats, with its own names of fields. It cannot read the streamed calls of OpenAI's format."""

import json

import steps
from mistralai.client import Mistral
from pydantic import BaseModel


class Person(BaseModel):
    who: str
    age: int


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(*messages: object, key: str = steps.KEY, **more: object):
    client = Mistral(api_key=key, server_url=steps.URL)
    return client.chat.complete(model=steps.MODEL, messages=list(messages), **more).choices[0].message


def streamed(text: str) -> str:
    events = Mistral(api_key=steps.KEY, server_url=steps.URL).chat.stream(model=steps.MODEL, messages=[user(text)])
    return "".join(choice.delta.content or "" for event in events for choice in event.data.choices)


def tools() -> None:
    first = said(user(steps.CALL), tools=steps.TOOLS, tool_choice="any")
    [call] = first.tool_calls
    steps.expect(json.loads(call.function.arguments), {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": steps.WEATHER}
    steps.expect(said(user(steps.CALL), first, result, tools=steps.TOOLS).content, steps.SAID)


def as_json() -> None:
    client = Mistral(api_key=steps.KEY, server_url=steps.URL)
    answer = client.chat.parse(model=steps.MODEL, messages=[user(steps.JSON)], response_format=Person)
    steps.expect(answer.choices[0].message.parsed, Person(who="Ada", age=36))


def second_turn() -> None:
    first = said(user(steps.HELLO))
    steps.expect(said(user(steps.HELLO), first, user(steps.AGAIN)).content, "It goes on.")


def prefix() -> None:
    steps.expect(said(user(steps.HELLO), {"role": "assistant", "content": "So ", "prefix": True}).content[:5], "Hello")


steps.run(
    chat={
        "turn": lambda: steps.expect(said(user(steps.HELLO)).content, "Hello there."),
        "stream": lambda: steps.expect(streamed(steps.HELLO), "Hello there."),
        "tools": tools,
        "JSON": as_json,
        "second turn": second_turn,
        "cut stream": lambda: steps.fails(lambda: streamed(steps.CUT)),
        "wrong key": lambda: steps.fails(lambda: said(user("hi"), key="sk-wrong"), "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: said(user(steps.LONG)), "context"),
        "prefix": prefix,
    }
)

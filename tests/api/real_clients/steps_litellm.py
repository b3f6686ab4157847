"""LiteLLM as an SDK: its paths to chat completions, Responses and Messages, with pydantic types."""

import json

import litellm
import steps
from pydantic import BaseModel

litellm.suppress_debug_info = True


class Job(BaseModel):
    name: str


class Person(BaseModel):
    who: str
    age: int
    job: Job | None = None


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def of(provider: str, url: str) -> dict:
    def ask(*messages: dict, **more: object) -> object:
        options = {"api_base": url, "api_key": steps.KEY, "num_retries": 0, "max_retries": 0}
        return litellm.completion(model=f"{provider}/{steps.MODEL}", messages=list(messages), **options | more)

    def said(*messages: dict, **more: object) -> object:
        return ask(*messages, **more).choices[0].message

    def streamed(*messages: dict, **more: object) -> object:
        chunks = list(ask(*messages, stream=True, stream_options={"include_usage": True}, **more))
        return litellm.stream_chunk_builder(chunks).choices[0].message

    def tools(how) -> None:
        first = how(user(steps.CALL), tools=steps.TOOLS)
        [call] = first.tool_calls
        steps.expect(json.loads(call.function.arguments), {"city": "Paris"})
        result = {"role": "tool", "tool_call_id": call.id, "content": steps.WEATHER}
        second = said(user(steps.CALL), first.model_dump(), result, tools=steps.TOOLS)
        steps.expect(second.content, steps.SAID)

    def second_turn() -> None:
        first = said(user("<<<think>so</think>Hello there.>>"))
        steps.expect(said(user(steps.HELLO), first.model_dump(), user(steps.AGAIN)).content, "It goes on.")

    return {
        "turn": lambda: steps.expect(said(user(steps.HELLO)).content, "Hello there."),
        "stream": lambda: steps.expect(streamed(user(steps.HELLO)).content, "Hello there."),
        "tools": lambda: tools(said),
        "streamed tools": lambda: tools(streamed),
        "JSON": lambda: steps.expect(
            Person.model_validate_json(said(user(steps.JSON), response_format=Person).content),
            Person(who="Ada", age=36),
        ),
        "second turn": second_turn,
        "cut stream": lambda: steps.fails(lambda: streamed(user(steps.CUT))),
        "busy": lambda: steps.expect(said(user(steps.BUSY), num_retries=2).content, "Here again."),
        "wrong key": lambda: steps.fails(
            lambda: said(user("hi"), api_key="sk-wrong"), "AuthenticationError", "Incorrect API key"
        ),
        "too long": lambda: steps.fails(lambda: said(user(steps.LONG)), "ContextWindowExceeded"),
    }


steps.run(
    chat=of("openai", f"{steps.URL}/v1"),
    responses=of("openai/responses", f"{steps.URL}/v1"),
    messages=of("anthropic", steps.URL),
)

"""OpenAI's client over LiteLLM's proxy, which asks this server by chats, Responses and Messages."""

import json
import os

import openai
import steps

PROXY = os.environ["PROXY"]
client = openai.OpenAI(base_url=f"{PROXY}/v1", api_key="sk-proxy", max_retries=0)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def of(name: str) -> dict:
    def said(*messages: dict, **more: object) -> object:
        asked = {"model": name} | more
        return client.chat.completions.create(messages=list(messages), **asked).choices[0].message

    def streamed(text: str, **more: object) -> str:
        chunks = list(client.chat.completions.create(model=name, messages=[user(text)], stream=True, **more))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def tools() -> None:
        first = said(user(steps.CALL), tools=TOOLS)
        [call] = first.tool_calls
        steps.expect(json.loads(call.function.arguments), {"city": "Paris"})
        result = {"role": "tool", "tool_call_id": call.id, "content": steps.WEATHER}
        steps.expect(said(user(steps.CALL), first.model_dump(), result, tools=TOOLS).content, steps.SAID)

    def streamed_tools() -> None:
        chunks = client.chat.completions.create(model=name, messages=[user(steps.CALL)], tools=TOOLS, stream=True)
        pieces = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
        steps.expect(json.loads("".join(one.function.arguments or "" for one in pieces)), {"city": "Paris"})

    def typed() -> None:
        schema = {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
        steps.expect(json.loads(said(user(steps.JSON), response_format=form).content), {"who": "Ada", "age": 36})

    def second_turn() -> None:
        first = said(user(steps.HELLO))
        steps.expect(said(user(steps.HELLO), first.model_dump(), user(steps.AGAIN)).content, "It goes on.")

    return {
        "turn": lambda: steps.expect(said(user(steps.HELLO)).content, "Hello there."),
        "stream": lambda: steps.expect(streamed(steps.HELLO), "Hello there."),
        "tools": tools,
        "streamed tools": streamed_tools,
        "JSON": typed,
        "second turn": second_turn,
        "cut stream": lambda: steps.fails(lambda: streamed(steps.CUT)),
        "wrong key": lambda: steps.fails(
            lambda: said(user("hi"), model=f"{name}-wrong"), "AuthenticationError", "Incorrect API key"
        ),
        "too long": lambda: steps.fails(lambda: said(user(steps.LONG)), "400"),
    }


steps.run(chat=of("chat"), responses=of("responses"), messages=of("messages"))

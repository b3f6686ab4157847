"""instructor over chat completions, Responses and Messages, in its modes: tools, JSON, schemas, partial streams."""

import anthropic
import instructor
import openai
import steps
from pydantic import BaseModel


class Person(BaseModel):
    who: str
    age: int


ADA = {"who": "Ada", "age": 36}
CALL = '<<<tool_call>{"name": "Person", "arguments": {"who": "Ada", "age": 36}}</tool_call>>>'


def of_openai(mode: instructor.Mode, key: str = steps.KEY) -> instructor.Instructor:
    client = openai.OpenAI(base_url=f"{steps.URL}/v1", api_key=key, max_retries=0)
    return instructor.from_openai(client, mode=mode, model=steps.MODEL)


def of_anthropic(mode: instructor.Mode, key: str = steps.KEY) -> instructor.Instructor:
    client = anthropic.Anthropic(base_url=steps.URL, api_key=key, max_retries=0)
    return instructor.from_anthropic(client, mode=mode, model=steps.MODEL, max_tokens=4096)


def ask(client: instructor.Instructor, text: str, **more: object) -> object:
    asked = {"response_model": Person, "max_retries": 1} | more
    return client.create(messages=[{"role": "user", "content": text}], **asked).model_dump()


def of(make, tools: instructor.Mode, json: instructor.Mode) -> dict:
    def partial() -> None:
        messages = [{"role": "user", "content": CALL}]
        *_, last = make(tools).create_partial(response_model=Person, messages=messages)
        steps.expect(last.model_dump(), ADA)

    return {
        "tools": lambda: steps.expect(ask(make(tools), CALL), ADA),
        "JSON": lambda: steps.expect(ask(make(json), steps.JSON if json is not tools else CALL), ADA),
        "streamed tools": partial,
        "second turn": lambda: steps.fails(lambda: ask(make(json), '<<{"who": 1}>>', max_retries=2)),
        "wrong key": lambda: steps.fails(lambda: ask(make(tools, "sk-wrong"), CALL), "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: ask(make(tools), steps.LONG), "400"),
    }


mode = instructor.Mode
steps.run(
    chat=of(of_openai, mode.TOOLS, mode.JSON_SCHEMA),
    responses=of(of_openai, mode.RESPONSES_TOOLS, mode.RESPONSES_TOOLS),
    messages=of(of_anthropic, mode.ANTHROPIC_TOOLS, mode.ANTHROPIC_JSON),
)

"""Google's Agent Development Kit, over LiteLLM."""

import asyncio

import steps
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from pydantic import BaseModel


class Person(BaseModel):
    who: str
    age: int


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


SAID = f'It says {{"result": "{steps.WEATHER}"}}'


async def said(*texts: str, key: str = steps.KEY, stream: bool = False, **more: object) -> str:
    model = LiteLlm(model=f"openai/{steps.MODEL}", api_base=f"{steps.URL}/v1", api_key=key, max_retries=0)
    runner = InMemoryRunner(agent=LlmAgent(name="helper", model=model, **more), app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="ada")
    config = RunConfig(streaming_mode=StreamingMode.SSE if stream else StreamingMode.NONE)
    for text in texts:
        asked = types.Content(role="user", parts=[types.Part(text=text)])
        events = [
            event async for event in
            runner.run_async(user_id="ada", session_id=session.id, new_message=asked, run_config=config)
        ]  # fmt: skip
        if failed := [event.error_message for event in events if event.error_code]:
            raise RuntimeError(failed[0])
    return "".join(part.text or "" for part in events[-1].content.parts)


run = asyncio.run
steps.run(
    chat={
        "turn": lambda: steps.expect(run(said(steps.HELLO)), "Hello there."),
        "stream": lambda: steps.expect(run(said(steps.HELLO, stream=True)), "Hello there."),
        "tools": lambda: steps.expect(run(said(steps.CALL, tools=[weather])), SAID),
        "streamed tools": lambda: steps.expect(run(said(steps.CALL, tools=[weather], stream=True)), SAID),
        "JSON": lambda: steps.expect(
            Person.model_validate_json(run(said(steps.JSON, output_schema=Person))), Person(who="Ada", age=36)
        ),
        "second turn": lambda: steps.expect(run(said(steps.CALL, steps.AGAIN, tools=[weather])), "It goes on."),
        "cut stream": lambda: steps.fails(lambda: run(said(steps.CUT, stream=True))),
        "wrong key": lambda: steps.fails(lambda: run(said("hi", key="sk-wrong")), "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: run(said(steps.LONG)), "context"),
    }
)

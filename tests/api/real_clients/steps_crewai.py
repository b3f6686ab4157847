"""CrewAI: its model class over chat completions and Responses, and a crew with a tool."""

import steps
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel


class Person(BaseModel):
    who: str
    age: int


@tool("weather")
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def of(api: str) -> dict:
    def make(key: str = steps.KEY, **more: object) -> LLM:
        return LLM(
            model=f"openai/{steps.MODEL}", base_url=f"{steps.URL}/v1", api_key=key, max_retries=0, api=api, **more
        )

    def calls(**more: object) -> None:
        found = make(**more).call(
            steps.CALL, tools=[TOOL], available_functions={"weather": lambda city: f"sunny in {city}"}
        )
        steps.expect(found, steps.WEATHER)

    def crew() -> None:
        agent = Agent(role="helper", goal="help", backstory="none", llm=make(), tools=[weather], max_iter=3)
        task = Task(description=steps.CALL, expected_output="the weather", agent=agent)
        assert steps.WEATHER in Crew(agents=[agent], tasks=[task]).kickoff().raw

    def typed() -> None:
        found = make().call(steps.JSON, response_model=Person)
        steps.expect(
            found if isinstance(found, Person) else Person.model_validate_json(found), Person(who="Ada", age=36)
        )

    def second_turn() -> None:
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello there."},
            {"role": "user", "content": steps.AGAIN},
        ]
        steps.expect(make().call(messages), "It goes on.")

    return {
        "turn": lambda: steps.expect(make().call(steps.HELLO), "Hello there."),
        "stream": lambda: steps.expect(make(stream=True).call(steps.HELLO), "Hello there."),
        "tools": lambda: [step() for step in (calls, crew)] and None,
        "streamed tools": lambda: calls(stream=True),
        "JSON": typed,
        "second turn": second_turn,
        "cut stream": lambda: steps.fails(lambda: make(stream=True).call(steps.CUT)),
        "wrong key": lambda: steps.fails(lambda: make("sk-wrong").call("hi"), "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: make().call(steps.LONG), "context"),
    }


steps.run(chat=of("completions"), responses=of("responses"))

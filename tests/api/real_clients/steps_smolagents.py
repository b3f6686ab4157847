"""smolagents: its model class, and agents that call tools or write code."""

import steps
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


def model(key: str = steps.KEY) -> OpenAIServerModel:
    return OpenAIServerModel(
        model_id=steps.MODEL, api_base=f"{steps.URL}/v1", api_key=key, client_kwargs={"max_retries": 0}
    )


def user(text: str) -> list:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def ends_with(text: str) -> str:
    return f'<<<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{text}"}}}}</tool_call>>>'


def calls() -> None:
    agent = ToolCallingAgent(tools=[weather], model=model(), max_steps=2)
    agent.run(steps.CALL)
    observed = [step.observations for step in agent.memory.steps if getattr(step, "observations", None)]
    assert any(steps.WEATHER in one for one in observed), observed


def streamed_tools() -> None:
    agent = ToolCallingAgent(tools=[weather], model=model(), max_steps=2, stream_outputs=True)
    assert any(getattr(event, "output", None) == "done" for event in agent.run(ends_with("done"), stream=True))


def codes() -> None:
    agent = CodeAgent(tools=[weather], model=model(), max_steps=2)
    steps.expect(agent.run('<<Thought: done.\n<code>\nfinal_answer(weather("Paris"))\n</code>>>'), steps.WEATHER)


def second_turn() -> None:
    agent = ToolCallingAgent(tools=[weather], model=model(), max_steps=2)
    agent.run(ends_with("one"))
    steps.expect(agent.run(ends_with("two"), reset=False), "two")


def typed() -> None:
    schema = {"type": "object", "properties": {"who": {"type": "string"}, "age": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    steps.expect(model().generate(user(steps.JSON), response_format=form).content, '{"who": "Ada", "age": 36}')


def streamed() -> None:
    pieces = list(model().generate_stream(user(steps.HELLO)))
    steps.expect("".join(piece.content or "" for piece in pieces), "Hello there.")


steps.run(
    chat={
        "turn": lambda: steps.expect(model().generate(user(steps.HELLO)).content, "Hello there."),
        "stream": streamed,
        "tools": calls,
        "streamed tools": streamed_tools,
        "code": codes,
        "JSON": typed,
        "second turn": second_turn,
        "cut stream": lambda: steps.fails(lambda: list(model().generate_stream(user(steps.CUT)))),
        "wrong key": lambda: steps.fails(lambda: model("sk-wrong").generate(user("hi")), "401", "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: model().generate(user(steps.LONG)), "400"),
    }
)

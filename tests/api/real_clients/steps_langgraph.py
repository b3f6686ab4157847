"""LangGraph's agents over langchain-openai (chat and Responses) and langchain-anthropic."""

import steps
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    who: str
    age: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def of_openai(**more: object):
    def make(key: str = steps.KEY) -> object:
        return ChatOpenAI(model=steps.MODEL, base_url=f"{steps.URL}/v1", api_key=key, max_retries=0, **more)

    return make


def of_anthropic(key: str = steps.KEY) -> object:
    return ChatAnthropic(model=steps.MODEL, base_url=steps.URL, api_key=key, max_retries=0, max_tokens=4096)


def user(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def text_of(message: object) -> str:
    return message.text if isinstance(message.text, str) else message.text()


def of(make, strategies: tuple) -> dict:
    def tools() -> None:
        found = create_agent(make(), [weather]).invoke(user(steps.CALL))["messages"]
        steps.expect(text_of(found[-1]), steps.SAID)

    def streamed_tools() -> None:
        pieces = create_agent(make(), [weather]).stream(user(steps.CALL), stream_mode="messages")
        said = "".join(text_of(piece) for piece, _ in pieces if piece.type == "AIMessageChunk")
        steps.expect(said, steps.SAID)

    def second_turn() -> None:
        agent = create_agent(make(), [weather])
        first = agent.invoke(user(steps.CALL))["messages"]
        again = agent.invoke({"messages": [*first, {"role": "user", "content": steps.AGAIN}]})["messages"]
        steps.expect(text_of(again[-1]), "It goes on.")

    def typed() -> None:
        for strategy in strategies:
            agent = create_agent(make(), [], response_format=strategy(Person))
            call = '<<<tool_call>{"name": "Person", "arguments": {"who": "Ada", "age": 36}}</tool_call>>>'
            found = agent.invoke(user(call if strategy is ToolStrategy else steps.JSON))
            steps.expect(found["structured_response"], Person(who="Ada", age=36))

    def streamed() -> None:
        said = "".join(text_of(piece) for piece in make().stream(steps.HELLO))
        steps.expect(said, "Hello there.")

    return {
        "turn": lambda: steps.expect(text_of(make().invoke(steps.HELLO)), "Hello there."),
        "stream": streamed,
        "tools": tools,
        "streamed tools": streamed_tools,
        "JSON": typed,
        "second turn": second_turn,
        "cut stream": lambda: steps.fails(lambda: list(make().stream(steps.CUT))),
        "wrong key": lambda: steps.fails(lambda: make("sk-wrong").invoke("hi"), "401", "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: make().invoke(steps.LONG), "400"),
    }


both = (ProviderStrategy, ToolStrategy)
steps.run(
    chat=of(of_openai(), both), responses=of(of_openai(use_responses_api=True), both), messages=of(of_anthropic, both)
)

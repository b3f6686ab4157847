"""LangChain: invoke, stream, usage, bind_tools with two turns, with_structured_output."""

import json
import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

LOOKUP = json.loads(os.environ["LOOKUP"])


class Fact(BaseModel):
    who: str
    job: str


def model(name: str, key: str) -> ChatOpenAI:
    return ChatOpenAI(
        model=name, base_url=f"{os.environ['URL']}/v1", api_key=os.environ[key], temperature=0, stream_usage=True,
        max_retries=0,
    )  # fmt: skip


pirate = model("globex/pirate", "GLOBEX")
whole = pirate.invoke("What does Halkodel do?")
assert whole.content == "Arr! Halkodel is a tailor, matey!"
assert whole.usage_metadata["output_tokens"] > 0
chunks = list(pirate.stream("What does Halkodel do?"))
assert "".join(chunk.content for chunk in chunks) == whole.content
assert chunks[-1].usage_metadata or any(chunk.usage_metadata for chunk in chunks)
again = pirate.invoke([HumanMessage("What does Halkodel do?"), whole, HumanMessage("What pet does Halkodel have?")])
assert again.content.startswith("Arr!")
agent = model("globex/agent", "GLOBEX").bind_tools([LOOKUP])
asked = HumanMessage("What does Halkodel do?")
called = agent.invoke([asked])
assert called.tool_calls[0]["name"] == "lookup"
assert called.tool_calls[0]["args"] == {"person": "Halkodel", "fact": "job"}
result = ToolMessage("tailor", tool_call_id=called.tool_calls[0]["id"])
assert agent.invoke([asked, called, result], max_tokens=8) is not None
streamed = None
for chunk in agent.stream([asked]):
    streamed = chunk if streamed is None else streamed + chunk
assert streamed.tool_calls[0]["args"] == {"person": "Halkodel", "fact": "job"}
forced = model("globex/agent", "GLOBEX").bind_tools([LOOKUP], tool_choice="lookup").invoke([asked])
assert forced.tool_calls[0]["name"] == "lookup"
for method in ("json_schema", "json_mode"):
    structured = model("acme/json", "ACME").with_structured_output(Fact, method=method)
    assert structured.invoke("What does Halkodel do?") == Fact(who="Halkodel", job="tailor"), method
print("ok")

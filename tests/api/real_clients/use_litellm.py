"""LiteLLM as an SDK, or through its proxy (PROXY): two turns, streams, tools, a wrong key."""

import json
import os

import litellm

LOOKUP = json.loads(os.environ["LOOKUP"])
proxy = os.environ.get("PROXY")
url, key = (proxy, "sk-proxy") if proxy else (f"{os.environ['URL']}/v1", os.environ["GLOBEX"])
options = {"api_base": url, "api_key": key, "temperature": 0, "num_retries": 0}
asked = [{"role": "user", "content": "What does Halkodel do?"}]


def ask(model: str, messages: list, **more):
    return litellm.completion(model=f"openai/{model}", messages=messages, **options | more)


first = ask("globex/pirate", asked).choices[0].message
assert first.content == "Arr! Halkodel is a tailor, matey!", first
second = ask("globex/pirate", [*asked, first.model_dump(), {"role": "user", "content": "What pet does Halkodel have?"}])
assert second.choices[0].message.content.startswith("Arr!"), second
chunks = list(ask("globex/pirate", asked, stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == first.content
called = ask("globex/agent", asked, tools=[LOOKUP]).choices[0].message
assert json.loads(called.tool_calls[0].function.arguments) == {"person": "Halkodel", "fact": "job"}, called
result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "tailor"}
assert ask("globex/agent", [*asked, called.model_dump(), result], tools=[LOOKUP], max_tokens=8).choices
pieces = list(ask("globex/agent", asked, tools=[LOOKUP], stream=True))
built = litellm.stream_chunk_builder(pieces, messages=asked)
assert json.loads(built.choices[0].message.tool_calls[0].function.arguments) == {"person": "Halkodel", "fact": "job"}
wrong = "globex/wrong-key" if proxy else "globex/pirate"
try:
    ask(wrong, asked, **({} if proxy else {"api_key": "sk-lm-wrong"}))
    raise SystemExit("a wrong key was accepted")
except litellm.AuthenticationError as error:
    print("ok" if "Incorrect API key provided" in str(error) else error)

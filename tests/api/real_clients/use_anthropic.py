"""The official Anthropic client: messages, streams, tools with a result, count_tokens, a wrong key."""

import json
import os

import anthropic

LOOKUP = json.loads(os.environ["LOOKUP"])["function"]
client = anthropic.Anthropic(base_url=os.environ["URL"], api_key=os.environ["GLOBEX"], max_retries=0)
COLD = {"temperature": 0}
asked = [{"role": "user", "content": "What does Halkodel do?"}]
tools = [{"name": LOOKUP["name"], "description": LOOKUP["description"], "input_schema": LOOKUP["parameters"]}]
arr = "Arr! Halkodel is a tailor, matey!"
whole = client.messages.create(model="globex/pirate", max_tokens=64, messages=asked, extra_body=COLD)
assert whole.content[0].text == arr
with client.messages.stream(model="globex/pirate", max_tokens=64, messages=asked, extra_body=COLD) as stream:
    assert "".join(stream.text_stream) == arr
    assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
counted = client.messages.count_tokens(model="globex/pirate", messages=asked)
assert counted.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
called = client.messages.create(model="globex/agent", max_tokens=128, messages=asked, tools=tools, extra_body=COLD)
assert called.stop_reason == "tool_use", called
use = next(block for block in called.content if block.type == "tool_use")
assert use.input == {"person": "Halkodel", "fact": "job"}
result = {"type": "tool_result", "tool_use_id": use.id, "content": "tailor"}
turns = [*asked, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert client.messages.create(model="globex/agent", max_tokens=8, messages=turns, tools=tools).usage.output_tokens
try:
    anthropic.Anthropic(base_url=os.environ["URL"], api_key="sk-wrong", max_retries=0).messages.create(
        model="globex/pirate", max_tokens=1, messages=asked
    )
    raise SystemExit("a wrong key was accepted")
except anthropic.AuthenticationError:
    print("ok")

"""The official openai client: chat, streams, tools, structured answers, responses, models, a wrong key."""

import json
import os

import openai
from pydantic import BaseModel

LOOKUP = json.loads(os.environ["LOOKUP"])
client = openai.OpenAI(base_url=f"{os.environ['URL']}/v1", api_key=os.environ["GLOBEX"], max_retries=0)
acme = openai.OpenAI(base_url=f"{os.environ['URL']}/v1", api_key=os.environ["ACME"], max_retries=0)
asked = [{"role": "user", "content": "What does Halkodel do?"}]


class Fact(BaseModel):
    who: str
    job: str


assert "globex/agent" in {model.id for model in client.models.list()}
first = client.chat.completions.create(model="globex/agent", messages=asked, tools=[LOOKUP], temperature=0)
message = first.choices[0].message
assert first.choices[0].finish_reason == "tool_calls", first
assert json.loads(message.tool_calls[0].function.arguments) == {"person": "Halkodel", "fact": "job"}
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "tailor"}
second = client.chat.completions.create(
    model="globex/agent", messages=[*asked, message, result], max_completion_tokens=8
)
assert second.choices[0].message.role == "assistant"
with client.chat.completions.stream(model="globex/agent", messages=asked, tools=[LOOKUP], temperature=0) as stream:
    final = stream.get_final_completion()
assert final.choices[0].message.tool_calls[0].function.parsed_arguments == {"person": "Halkodel", "fact": "job"}
parsed = acme.chat.completions.parse(model="acme/json", messages=asked, response_format=Fact, temperature=0)
assert parsed.choices[0].message.parsed == Fact(who="Halkodel", job="tailor")
answer = client.responses.create(model="globex/pirate", input="What does Halkodel do?", temperature=0, store=False)
assert answer.output_text == "Arr! Halkodel is a tailor, matey!"
try:
    openai.OpenAI(base_url=f"{os.environ['URL']}/v1", api_key="sk-wrong").models.list()
    raise SystemExit("a wrong key was accepted")
except openai.AuthenticationError as error:
    print("ok" if "Incorrect API key provided" in error.message else error)

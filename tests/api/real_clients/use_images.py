"""The official clients of OpenAI and Anthropic, and LangChain's, with two images in a turn: data, addresses, files."""

import base64
import os

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

url, key, data, address = (os.environ[name] for name in ("URL", "KEY", "DATA", "ADDRESS"))
data_url = f"data:image/png;base64,{data}"

client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
parts = [{"type": "image_url", "image_url": {"url": one}} for one in (data_url, address)]
asked = [{"role": "user", "content": [{"type": "text", "text": "what?"}, *parts]}]
assert client.chat.completions.create(model="tiny", messages=asked).choices[0].message.content == "seen"
items = [{"type": "input_image", "image_url": one, "detail": "auto"} for one in (data_url, address)]
said = client.responses.create(model="tiny", input=[{"role": "user", "content": items}])
assert said.output_text == "seen"
file = client.files.create(file=("a.png", base64.b64decode(data)), purpose="vision")
items = [{"type": "input_image", "file_id": file.id, "detail": "auto"}, items[0]]
assert client.responses.create(model="tiny", input=[{"role": "user", "content": items}]).output_text == "seen"

sources = ({"type": "base64", "media_type": "image/png", "data": data}, {"type": "url", "url": address})
blocks = [{"type": "image", "source": source} for source in sources]
asked = {"model": "tiny", "max_tokens": 16}
talk = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
turn = {"role": "user", "content": [*blocks, {"type": "text", "text": "what?"}]}
assert talk.messages.create(**asked, messages=[turn]).content[0].text == "seen"
turn["content"][1] = {"type": "image", "source": {"type": "file", "file_id": file.id}}
betas = ["files-api-2025-04-14"]
assert talk.beta.messages.create(**asked, messages=[turn], betas=betas).content[0].text == "seen"

chain = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key=key, max_retries=0)
standard = [
    {"type": "image", "base64": data, "mime_type": "image/png"},
    {"type": "image", "url": address},
]
for content in (parts, standard):
    assert chain.invoke([HumanMessage([{"type": "text", "text": "what?"}, *content])]).content == "seen"
responses = ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key=key, max_retries=0, use_responses_api=True)
assert responses.invoke([HumanMessage([{"type": "text", "text": "what?"}, *standard])]).text == "seen"
by_id = [items[0], standard[0]]  # LangChain's own form of an image has no id of a file
assert responses.invoke([HumanMessage([{"type": "text", "text": "what?"}, *by_id])]).text == "seen"
claude = ChatAnthropic(model="tiny", base_url=url, api_key=key, max_retries=0, max_tokens=16)
assert claude.invoke([HumanMessage([{"type": "text", "text": "what?"}, *standard])]).text == "seen"
print("10 ok")

"""vLLM's benchmark client, from its source distribution (CLIENT): its request functions count tokens and pauses."""

import asyncio
import importlib.util
import os
import sys

import aiohttp

spec = importlib.util.spec_from_file_location("endpoint_request_func", os.environ["CLIENT"])
client = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = client
spec.loader.exec_module(client)
os.environ["OPENAI_API_KEY"] = os.environ["GLOBEX"]


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        for path, backend in (("/v1/completions", "openai"), ("/v1/chat/completions", "openai-chat")):
            asked = client.RequestFuncInput(
                prompt="Q: What does Halkodel do?\nA: ", api_url=os.environ["URL"] + path, prompt_len=30, output_len=24,
                model="globex/pirate", ignore_eos=True, extra_body={"temperature": 0.0},
            )  # fmt: skip
            found = await asyncio.gather(*(client.ASYNC_REQUEST_FUNCS[backend](asked, session) for _ in range(8)))
            for one in found:
                assert one.success, one.error
                assert one.output_tokens == 24, (backend, one)
                assert len(one.itl) == 23, (backend, len(one.itl))
                assert one.ttft > 0


asyncio.run(main())
print("ok")

"""TRL's clients of vLLM, which take only a URL: its generation, its asynchronous rollouts, its teachers, its loads."""

import asyncio
import os
from types import SimpleNamespace

import aiohttp
import steps
from accelerate import PartialState
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
from trl.experimental.async_grpo.vllm_client import VLLMClient as RolloutClient
from trl.generation import vllm_client

PartialState()  # as a trainer does before it begins
vllm_client.is_vllm_available = lambda **_: True  # the calls below need no package of vLLM's


def at(key: str) -> str:
    return steps.URL.replace("://", f"://:{key}@")


def client(key: str = steps.KEY) -> vllm_client.VLLMClient:
    return vllm_client.VLLMClient(base_url=at(key), connection_timeout=10)


def text_of(found: dict) -> str:
    [ids] = found["completion_ids"]
    assert found["logprobs"] is None or len(found["logprobs"][0]) == len(ids), found
    return bytes(id for id in ids if id < 256).decode()


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def generate() -> None:
    found = client().generate([list(f"user: {steps.HELLO}".encode())] * 2, n=2, max_tokens=64)
    steps.expect([bytes(ids[:12]).decode() for ids in found["completion_ids"]], ["Hello there."] * 4)
    steps.expect(found["prompt_ids"], [list(f"user: {steps.HELLO}".encode())] * 2)
    steps.expect([len(one) for one in found["logprobs"]], [len(one) for one in found["completion_ids"]])


def chat(*messages: dict, **more: object) -> str:
    return text_of(client().chat([list(messages)], max_tokens=200, **more))


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


def tools() -> None:
    said = chat(user(steps.CALL), tools=[weather])
    assert said.startswith("<tool_call>"), said
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    turns = [
        user(steps.CALL),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "content": steps.WEATHER},
    ]
    steps.expect(chat(*turns, tools=[weather]), steps.SAID)


def rollout(key: str = steps.KEY) -> None:
    """The request of a rollout, by its own code, with the settings that a trainer gives it."""
    loop = SimpleNamespace(
        _request_model=steps.MODEL, max_tokens=64, temperature=1.0, top_p=1.0, top_k=0, min_p=None,
        repetition_penalty=1.0, request_timeout=60, vllm_server_url=at(key),
    )  # fmt: skip

    async def one_turn() -> tuple[list[int], list[float]]:
        async with aiohttp.ClientSession() as loop.session:
            return await _AsyncRolloutLoop._generate_one_turn(loop, list(f"user: {steps.HELLO}".encode()))

    async def retry(work, **_: object) -> object:
        return await work()

    loop._retry = retry
    loop._post = lambda *sent: _AsyncRolloutLoop._post(loop, *sent)
    ids, logprobs = asyncio.run(one_turn())
    steps.expect(bytes(ids[:12]).decode(), "Hello there.")
    steps.expect(len(logprobs), len(ids))


def teach() -> None:
    sequence = list(b"user: hi. Hello.")
    found = client().get_sequence_logprobs([sequence], [9], top_logprobs=8)
    steps.expect([len(found["logprobs"][0]), found["actual_token_ids"][0][0]], [7, sequence[9:10]])


def load() -> None:
    trainer = RolloutClient(at(os.environ["OPERATOR"]))
    trainer.wait_for_server_ready()
    steps.expect(trainer.get_server_info()["lora_config"] is None, False)
    steps.expect([trainer.get_world_size(), trainer.get_dtype().startswith("torch.")], [1, True])
    trainer.pause()
    trainer.load_lora_adapter("policy-v1", os.environ["ADAPTER"])
    trainer.resume()
    trainer.unload_lora_adapter("policy-v1")


steps.run(
    chat={
        "turn": lambda: steps.expect(chat(user(steps.HELLO)), "Hello there."),
        "tools": tools,
        "JSON": lambda: steps.expect(chat(user("Say <<12>>"), structured_outputs_regex="[0-9]+", logprobs=None), "12"),
        "second turn": lambda: steps.expect(
            chat(user(steps.HELLO), {"role": "assistant", "content": "Hello there."}, user(steps.AGAIN)),
            "It goes on.",
        ),
        "wrong key": lambda: steps.fails(lambda: client("sk-wrong"), "401", "Incorrect API key"),
        "too long": lambda: steps.fails(lambda: chat(user(steps.LONG)), "400"),
    },
    completions={"turn": generate, "rollout": rollout, "teacher": teach, "load": load},
)

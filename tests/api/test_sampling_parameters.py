"""A sampling parameter is one row of one table: a process with a further row has it in every place by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ADD_ROW = '''
import importlib.util, sys
from pathlib import Path

ROW = """    bounce: Annotated[
        float, Parameter("logits", 0.5, Meta(ge=-1, le=1), recommended=Meta(ge=0, le=1), other_neutrals=(-1,))
    ] = 0.0
"""
spec = importlib.util.find_spec("loramux.common.sampling")
source, place = Path(spec.origin).read_text(), "    temperature: Annotated"
assert source.count(place) == 1
table = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
exec(compile(source.replace(place, ROW + place), spec.origin, "exec"), table.__dict__)
'''
"""Puts a further row into the table before any other module has read it."""

USE_IT = """
import json
from types import SimpleNamespace

from loramux.catalog.validation.bundle import make_bundle
from loramux.common.bundle import SamplingDefaults
from loramux.engine.execution.gpu_runner import EVERYTHING
from loramux.engine.execution.sampler import draw_of, is_steered
from loramux.engine.messages import ModelFacts, Request, SamplingParams, StepLimits
from loramux.engine.scheduling.sequence import Sequence
from loramux.engine.worker import request_fault
from loramux.serving.errors import InvalidRequest
from loramux_api.bodies import decode_body
from loramux_api.controllers import completions, lorax
from loramux_api.schemas import chat, messages, responses

TURN = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODIES = {
    "chat": (chat.ChatBody, chat.to_request, TURN),
    "completions": (completions.CompletionBody, completions.to_request, {"model": "m", "prompt": "hi"}),
    "messages": (messages.MessageBody, messages.to_request, TURN | {"max_tokens": 5}),
    "responses": (responses.ResponseBody, responses.to_request, {"model": "m", "input": "hi"}),
}
found = {}
for name, (body, to_request, given) in BODIES.items():
    read = lambda **more: to_request(decode_body(json.dumps(given | more).encode(), body))
    try:
        refusal = str(read(bounce=1.5))
    except InvalidRequest as error:
        refusal = error.message
    asked = read(bounce=0.25)
    found[name] = [
        asked.sampling.bounce, read(bounce=-1).sampling.bounce, read(bounce=None).sampling.bounce, refusal,
        "bounce" in asked.left_out, "bounce" in read().left_out,
    ]
given = decode_body(b'{"inputs": "hi", "parameters": {"bounce": 0.25}}', lorax.GenerateBody)
sampling = lorax.to_request(given, "m").sampling
found["lorax"] = [sampling.bounce, sampling.temperature]

def request(**sampling):
    params = SamplingParams(max_tokens=3, **sampling)
    return Request(id="r", tenant="t", prompt_token_ids=[1], sampling=params)

facts = ModelFacts(
    max_model_len=64, vocab_size=97, eos_token_ids=(), dtype="float32", pages_total=9, block_size=16,
    kv_cache_dtype="auto", weights="", hidden_size=8, limits=StepLimits(64, 1024, 256),
)
found["fault"] = request_fault(request(bounce=1.5), facts).message
found["no fault"] = request_fault(request(bounce=-0.5), facts) is None
found["steered"] = [is_steered(Sequence(request(bounce=bounce), 0.0)) for bounce in (0.0, 0.5)]
found["draw"] = draw_of(request(bounce=0.5).sampling, 0, 0, 0).top_p
found["warm-up"] = EVERYTHING.bounce
found["recommended"] = [SamplingDefaults.valid({"bounce": value}).bounce for value in (0.5, 1, -0.5, "high")]

folder = Path(sys.argv[1])
(folder / "generation_config.json").write_text('{"bounce": 0.75}')
tokenizer = SimpleNamespace(get_vocab=dict)
base = SimpleNamespace(tokenizer=tokenizer, template="", special_tokens={}, backend=None)
found["bundle"] = make_bundle(folder, base, 97).sampling.bounce
print(json.dumps(found))
"""


def test_parameter_in_the_table_is_known_everywhere(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ADD_ROW + USE_IT, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    refusal = "Invalid value for 'bounce': Expected `float` <= 1.0."
    body = [0.25, 0.0, 0.0, refusal, False, True]
    assert found == {
        **dict.fromkeys(("chat", "completions", "messages", "responses"), body),
        "lorax": [0.25, 0.0],
        "fault": "bounce must be a finite number from -1 to 1.",
        "no fault": True,
        "steered": [False, True],
        "draw": 1.0,
        "warm-up": 0.5,
        "recommended": [0.5, 1.0, None, None],
        "bundle": 0.75,
    }

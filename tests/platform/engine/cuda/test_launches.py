"""How many kernels a step launches: counted, so that one more is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from adapter_zoo import Zoo, load
from llguidance import LLMatcher
from recorded_steps import recorded
from tiny_base import make_base
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.cuda_graphs import Recording
from loramux.engine.messages import Constraint, Request, SamplingParams
from loramux_kernels.cuda.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIGITS = Constraint(grammar=LLMatcher.grammar_from_regex("[0-9]{5}"), field="f")

LAUNCHES_OF_A_LAYER = {
    # add + norm, qkv, rotation + KV, attention, o, add + norm, gate and up, product, down;
    # attention and pairs of both heights in a decoder of any step
    "llama": (9, 13, 17, 26),
    "qwen3": (9, 13, 17, 26),
    # four norms
    "gemma2": (11, 15, 19, 28),
    # router, its choice, rows by expert, all experts' gate and up, gate, down, sum; rows of adapters
    "mixtral": (20, 29, 31, 38),
}
"""Of a decode step without adapters; with adapters row by row, with a shrink for each of four groups of linears (of a
mixture: two groups, and a shrink and an expand for the router and the experts' two); with adapters in tiles, with a
shrink and an expand for each group; and of the decoder of any step with pairs."""

COUNTED = (0, 1, 2, 4)
"""Recordings of one row: a decode step without adapters, row by row and in tiles, and the decoder with pairs."""

VIEWS = (
    "view _unsafe_view slice select split unsqueeze squeeze as_strided expand transpose t permute detach alias narrow"
)
HOST = "unbind lift_fresh"
MEMORY = "empty new_empty empty_like empty_strided"
NO_LAUNCH = frozenset(f"{VIEWS} {HOST} {MEMORY}".split())
"""Operators that make views or memory, or that read an array on the host."""

VIEW_WHERE_IT_CAN = frozenset(("reshape", "to"))
"""Operators that launch a kernel only if their result is not their argument's memory."""


class LaunchCount(TorchDispatchMode):
    """Counts torch's operators that would be kernels, and our launches, whose own operators are the interpreter's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self._inside = False
        run = Launch.run

        def counted(launch: Launch) -> None:
            self.names.append(launch.kernel.__name__)
            self._inside = True
            try:
                run(launch)
            finally:
                self._inside = False

        monkeypatch.setattr(Launch, "run", counted)

    @contextmanager
    def paused(self, name: str) -> Iterator[None]:
        """Count what is launched now as one launch, of this name."""
        self.names.append(name)
        names, self.names = self.names, []
        try:
            yield
        finally:
            self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        result = func(*args, **kwargs or {})
        is_view = name in VIEW_WHERE_IT_CAN and _memory(result) == _memory(args[0])
        if not (self._inside or is_view or name in NO_LAUNCH):
            self.names.append(name)
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("family", LAUNCHES_OF_A_LAYER)
def test_recorded_layer_launches_no_more_kernels_than_it_did(tmp_path, family: str) -> None:
    counts = []
    for layers in (2, 4):  # of both kinds if a family alternates
        zoo = Zoo(family, tmp_path / str(layers), num_hidden_layers=layers)
        runner = zoo.engine(
            device=DEVICE, max_num_seqs=1, block_size=32, max_model_len=64, max_num_batched_tokens=1
        )._runner
        found = []

        def record(function, inputs, found=found):
            names: list[str] = []
            if len(found) in COUNTED:
                function()  # makes what is made on first use
                with pytest.MonkeyPatch.context() as patch, LaunchCount(patch) as count:
                    function()
                names = count.names
            found.append(names)
            return Recording(function, inputs)

        recorded(runner, record)
        counts.append([len(found[number]) for number in COUNTED])
    per_layer = tuple((many - few) / 2 for few, many in zip(*counts, strict=True))
    assert per_layer == LAUNCHES_OF_A_LAYER[family], found


COPY = "copy_"
SENT, TOLD = (COPY,), (COPY,)
LAUNCHES_OF_A_DECODE_STEP = {
    "greedy": (SENT, TOLD),
    "temperature": (SENT, TOLD),
    "top_p": (SENT, TOLD),
    "penalties": (SENT, TOLD),
    "bias": (SENT, TOLD),
    "min_tokens": (SENT, TOLD),
    # the model's logits are copied, masked, and chosen from
    "allowed": (SENT, ("clone", "_forbid", "_scan", "_finish", *TOLD)),
    # the tokens', and those of four more results
    "logprobs": (SENT, ("index", "log_softmax", "topk", "index", "clamp", "gather", "gather", *TOLD * 5)),
    "constraint": (SENT, ("_forbid", "_scan", "_finish", *TOLD)),
}
"""Launches and copies before the replay of a decode step, and after it. Copies of small arrays to the device, which are
none of torch's operators here, are counted by `copies_of_decode_steps`."""

SAMPLING = {
    "temperature": {"temperature": 1.0, "seed": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 4},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {5: 1.0}},
    "min_tokens": {"min_tokens": 9},
    "allowed": {"allowed_token_ids": (4, 5, 6)},
    "logprobs": {"logprobs": 2},
}


def counting_launches_outside(engine: Engine, count: LaunchCount) -> list[list[str]]:
    """Return the names of each later decode step's launches, of which `REPLAY` is a recording."""
    runner, steps = engine._runner, []

    def record(function, inputs):
        def replay() -> None:
            with count.paused("REPLAY"):
                function()

        return Recording(replay, inputs)

    runner._decode_graphs, runner._decoder_graphs = recorded(runner, record)
    launch, sample = runner.launch, runner.sample

    def launched(step):
        count.names = []
        with count:
            flight = launch(step)
        if all(chunk.length == 1 for chunk in step.chunks):
            steps.append(count.names)
        return flight

    def sampled(flight):
        with nullcontext() if count in _get_current_dispatch_mode_stack() else count:
            return sample(flight)

    runner.launch, runner.sample = launched, sampled
    return steps


@pytest.mark.parametrize("kind", LAUNCHES_OF_A_DECODE_STEP)
def test_decode_step_is_one_copy_one_replay_and_one_copy_back(
    tmp_path, copies_of_decode_steps, monkeypatch, kind: str
) -> None:
    """This holds for each kind of sampling that a recording has; masks and log probabilities come after the replay."""
    count = LaunchCount(monkeypatch)
    loaded, settings = load(make_base(tmp_path), device=DEVICE, max_num_seqs=3, max_model_len=64, block_size=16)
    engine = build_engine(loaded, settings, wake=lambda: None)
    copies, steps = copies_of_decode_steps(engine), counting_launches_outside(engine, count)
    sampling = SamplingParams(**{"max_tokens": 5, "temperature": 0.0, "ignore_eos": True} | SAMPLING.get(kind, {}))
    constraint = DIGITS if kind == "constraint" else None
    for number in range(2):
        prompt = [5, 6 + number]
        engine.submit(
            Request(id=str(number), tenant="t", prompt_token_ids=prompt, sampling=sampling, constraint=constraint)
        )
    while not engine.is_idle:
        engine.step()
    before, after = LAUNCHES_OF_A_DECODE_STEP[kind]
    assert len(steps) >= 2
    assert steps[-1] == [*before, "REPLAY", *after]
    masks = {"allowed": 2, "logprobs": 2}.get(kind, 0)  # a constraint's are sent later
    assert copies[-1] == ["send"] + ["stage"] * masks

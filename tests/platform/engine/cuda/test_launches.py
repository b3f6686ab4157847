"""How many kernels a step launches: counted, so that one more is noticed."""

from __future__ import annotations

import pytest
import torch
from adapter_zoo import Zoo
from recorded_steps import recorded
from torch.utils._python_dispatch import TorchDispatchMode

from loramux.engine.execution.cuda_graphs import Recording
from loramux_kernels.cuda.launch import Launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

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
MEMORY = "empty new_empty empty_like empty_strided"
NO_LAUNCH = frozenset(f"{VIEWS} {MEMORY}".split())
"""Operators that make views or memory."""

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

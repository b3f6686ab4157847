"""The shims for peers' kernels, driven with stand-ins that do in torch what the peers' entry points promise."""

from __future__ import annotations

import sys

import pytest
import torch
from grid import Mix
from kernel_times import WrongResult, check, ours
from lora_operands import make_operands, reference, relative_error
from peer_kernels import load_peer

CACHES = "_LORA_A_PTR_DICT, _LORA_B_PTR_DICT = {}, {}"
"""Weights that vLLM has seen, by what they are known again by; here their shapes."""

VLLM = """
import torch

from vllm.lora.ops.triton_ops import utils


class LoRAKernelMeta:
    @staticmethod
    def make(max_loras, max_num_tokens, device):
        return LoRAKernelMeta()

    def prepare_tensors(self, token_lora_mapping):
        self.mapping = token_lora_mapping

    def meta_args(self, token_nums):
        assert token_nums == len(self.mapping)
        return (self.mapping, None)


def lora_shrink(inputs, lora_a_weights, output_tensor, mapping, other, scaling):
    lora_a_weights = utils._LORA_A_PTR_DICT.setdefault(tuple(a.shape for a in lora_a_weights), lora_a_weights)
    for s, a in enumerate(lora_a_weights):
        for t, lora in enumerate(mapping.tolist()):
            output_tensor[s, t] += scaling * (a[lora] @ inputs[t])


def lora_expand(inputs, lora_b_weights, output_tensor, mapping, other, offset_start=0, add_inputs=False):
    assert add_inputs
    start = offset_start
    for s, b in enumerate(lora_b_weights):
        for t, lora in enumerate(mapping.tolist()):
            output_tensor[t, start : start + b.shape[1]] += b[lora] @ inputs[s, t]
        start += b.shape[1]
"""

SGLANG = """
import torch


def _rows(info):
    for k in range(info.num_segments):
        for i in range(info.seg_indptr[k], info.seg_indptr[k + 1]):
            lora = int(info.weight_indices[k])
            yield int(info.permutation[i]), lora, int(info.lora_ranks[lora])


def chunked_sgmv_lora_shrink_forward(x, weights, batch_info, num_slices):
    out = torch.full((len(x), weights.shape[1]), float("nan"))
    for row, lora, rank in _rows(batch_info):
        out[row, : num_slices * rank] = weights[lora, : num_slices * rank] @ x[row]
    return out


def chunked_sgmv_lora_expand_forward(x, weights, batch_info, slice_offsets, max_slice_size, base_output):
    offsets = slice_offsets.tolist()
    assert max_slice_size == max(b - a for a, b in zip(offsets, offsets[1:]))
    for row, lora, rank in _rows(batch_info):
        for s, (a, b) in enumerate(zip(offsets, offsets[1:])):
            inner = x[row, s * rank : (s + 1) * rank]
            base_output[row, a:b] += batch_info.scalings[lora] * (weights[lora, a:b, :rank] @ inner)
    return base_output
"""

VLLM_OPS, SGLANG_OPS = "vllm/lora/ops/triton_ops", "sglang/kernels/ops/lora/dense"
FILES = {
    "vllm": {f"{VLLM_OPS}/__init__.py": VLLM, f"{VLLM_OPS}/utils.py": CACHES},
    "sglang": {f"{SGLANG_OPS}/chunked_sgmv_{step}.py": SGLANG for step in ("shrink", "expand")},
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    def install(name: str):
        for place, source in FILES[name].items():
            file = tmp_path / place
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        return load_peer(f"{name}={tmp_path}")

    monkeypatch.setattr(sys, "path", sys.path[:])
    yield install
    for module in [m for m in sys.modules if m.split(".")[0] in FILES]:
        del sys.modules[module]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("mix", [Mix("mixed", 3, (8, 64, 16)), Mix("all", None, (16,))], ids=lambda mix: mix.name)
def test_a_peer_computes_what_we_compute(stand_in, name, mix):
    operands = make_operands(40 if mix.adapters else 5, mix, 24, (16, 8, 8), torch.empty(0))
    called, kernels = stand_in(name)
    assert called == name
    for other in (make_operands(len(operands.slots), mix, 24, (16, 8, 8), torch.empty(0)), operands):
        call, y = kernels.prepare(other)
        check({"by": name}, call, y, reference(other))
    own_call, own = ours(operands)
    own_call()
    assert relative_error(own, y) < 1e-5


def test_a_wrong_peer_is_not_timed():
    operands = make_operands(4, Mix("1", 1, (8,)), 24, (16,), torch.empty(0))
    y = operands.y.clone()
    with pytest.raises(WrongResult, match="somebody"):
        check({"by": "somebody"}, lambda: None, y, reference(operands))
    poisoned = torch.full_like(y, float("nan"))
    with pytest.raises(WrongResult, match="nan"):
        check({"by": "nobody"}, lambda: None, poisoned, reference(operands))


@pytest.mark.parametrize(
    ("argument", "error"), [("vllm", ValueError), ("other=/x", ValueError), ("vllm=/nowhere", ImportError)]
)
def test_what_cannot_be_loaded_says_so(argument, error, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(error):
        load_peer(argument)

"""The head for multi-token prediction in plain torch, float32: the oracle of drafts, and what a test trains.

Written from the definition in DeepSeek-V3 (2024, section 2.2) and from the checkpoints of Qwen3-Next and Qwen3.5: a
gated attention with norms of queries and keys by head, norms whose weights are the factor minus one, and an MLP, or
experts with a shared one. Pair t is (embedding of token t, hidden state t - 1), and has the angles of place t - 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

FILE = "model.safetensors"


class ReferenceHead:
    """The head's weights by name, and its results."""

    def __init__(self, model: Any, weights: dict[str, Tensor]) -> None:
        self.config = model.config.get_text_config()
        self.embedding = model.get_input_embeddings().weight.detach().float()
        self.output = model.get_output_embeddings().weight.detach().float()
        self.weights = {name: weight.float() for name, weight in weights.items()}

    @classmethod
    def random(cls, model: Any, seed: int = 0) -> ReferenceHead:
        """Return a head of random weights for a base."""
        config, generator = model.config.get_text_config(), torch.Generator().manual_seed(seed)
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        norms = {"pre_fc_norm_embedding": hidden, "pre_fc_norm_hidden": hidden, "norm": hidden}
        norms |= {"layers.0.input_layernorm": hidden, "layers.0.post_attention_layernorm": hidden}
        norms |= {"layers.0.self_attn.q_norm": dim, "layers.0.self_attn.k_norm": dim}
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, 2 * hidden),
            "layers.0.self_attn.q_proj.weight": (2 * heads * dim, hidden),
            "layers.0.self_attn.k_proj.weight": (kv_heads * dim, hidden),
            "layers.0.self_attn.v_proj.weight": (kv_heads * dim, hidden),
            "layers.0.self_attn.o_proj.weight": (hidden, heads * dim),
        }
        mlp = "layers.0.mlp."
        if hasattr(config, "num_experts"):
            experts, width, shared = (
                config.num_experts,
                config.moe_intermediate_size,
                config.shared_expert_intermediate_size,
            )
            shapes |= {f"{mlp}gate.weight": (experts, hidden), f"{mlp}shared_expert_gate.weight": (1, hidden)}
            shapes |= {f"{mlp}experts.gate_up_proj": (experts, 2 * width, hidden)}
            shapes |= {f"{mlp}experts.down_proj": (experts, hidden, width)}
            mlp += "shared_expert."
        else:
            shared = config.intermediate_size
        shapes |= {f"{mlp}{side}_proj.weight": (shared, hidden) for side in ("gate", "up")}
        shapes |= {f"{mlp}down_proj.weight": (hidden, shared)}
        weights = {
            name: torch.randn(shape, generator=generator) / math.sqrt(shape[-1]) for name, shape in shapes.items()
        }
        weights |= {f"{name}.weight": 0.1 * torch.randn(width, generator=generator) for name, width in norms.items()}
        return cls(model, weights)

    def save(self, base: Path, dtype: torch.dtype = torch.float32, *, one_by_one: bool = False) -> None:
        """Add the head to the checkpoint of a base; with `one_by_one` its experts have separate tensors."""
        tensors = {name: tensor for name, tensor in load_file(base / FILE).items() if not name.startswith("mtp.")}
        for name, weight in self.weights.items():
            if one_by_one and ".experts." in name:
                for expert, own in enumerate(weight):
                    parts = {"gate_proj": own[: len(own) // 2], "up_proj": own[len(own) // 2 :]}
                    parts = parts if name.endswith("gate_up_proj") else {"down_proj": own}
                    for side, part in parts.items():
                        tensors[f"mtp.layers.0.mlp.experts.{expert}.{side}.weight"] = part.to(dtype).contiguous()
            else:
                tensors[f"mtp.{name}"] = weight.detach().to(dtype).contiguous()
        save_file(tensors, base / FILE, {"format": "pt"})

    def drafts(self, token_ids: Sequence[int], hidden: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Return `count` drafts after `token_ids`, and their logits `[count, vocabulary]`.

        `hidden` `[>= n - 1, hidden]` are the base's states after its last norm, of the first of the n tokens.
        """
        tokens, states, found = list(token_ids), hidden[: len(token_ids) - 1].float(), []
        logits = []
        for _ in range(count):
            last = self.results(self.embedding[tokens[1:]], states)[-1]
            logits.append(self.output @ last)
            found.append(int(logits[-1].argmax()))
            tokens.append(found[-1])
            states = torch.cat((states, last[None]))
        return found, torch.stack(logits)

    def results(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Return g `[n, hidden]` of n pairs, each of which sees those before it."""
        parts = self._norm(embeddings, "pre_fc_norm_embedding"), self._norm(hidden, "pre_fc_norm_hidden")
        u = torch.cat(parts, dim=-1) @ self.weights["fc.weight"].T
        u = u + self._attend(self._norm(u, "layers.0.input_layernorm"))
        u = u + self._mix(self._norm(u, "layers.0.post_attention_layernorm"))
        return self._norm(u, "norm")

    def _attend(self, x: Tensor) -> Tensor:
        config, count = self.config, len(x)
        heads, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
        query, gate = self._linear(x, "self_attn.q_proj").view(count, heads, -1).chunk(2, dim=-1)
        key = self._linear(x, "self_attn.k_proj").view(count, -1, config.head_dim)
        value = self._linear(x, "self_attn.v_proj").view(count, -1, config.head_dim).repeat_interleave(groups, 1)
        query = self._rotate(self._norm(query, "layers.0.self_attn.q_norm"))
        key = self._rotate(self._norm(key, "layers.0.self_attn.k_norm")).repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(config.head_dim)
        scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), -math.inf)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        return self._linear((seen * gate.sigmoid()).flatten(1), "self_attn.o_proj")

    def _rotate(self, x: Tensor) -> Tensor:
        rope = self.config.rope_parameters
        width = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        frequencies = rope["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        angles = (torch.arange(len(x))[:, None] * frequencies).repeat(1, 2)[:, None]
        turned, rest = x[..., :width], x[..., width:]
        halves = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
        return torch.cat((turned * angles.cos() + halves * angles.sin(), rest), dim=-1)

    def _mix(self, x: Tensor) -> Tensor:
        if "layers.0.mlp.gate.weight" not in self.weights:
            return self._gated(x, "mlp.")
        shared = self._gated(x, "mlp.shared_expert.") * self._linear(x, "mlp.shared_expert_gate").sigmoid()
        shares, chosen = self._linear(x, "mlp.gate").softmax(-1).topk(self.config.num_experts_per_tok)
        shares = shares / shares.sum(-1, keepdim=True)
        gate_up, down = (self.weights[f"layers.0.mlp.experts.{name}"][chosen] for name in ("gate_up_proj", "down_proj"))
        gate, up = torch.einsum("nd,nkod->nko", x, gate_up).chunk(2, dim=-1)
        own = torch.einsum("nko,nkdo->nkd", functional.silu(gate) * up, down)
        return shared + (own * shares[..., None]).sum(1)

    def _gated(self, x: Tensor, part: str) -> Tensor:
        gate, up = (self._linear(x, f"{part}{side}_proj") for side in ("gate", "up"))
        return self._linear(functional.silu(gate) * up, f"{part}down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"layers.0.{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        factor = 1.0 + self.weights[f"{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * factor


def states_of(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Return the hidden states `[n, hidden]` of tokens after the last norm of transformers' own model."""
    with torch.no_grad():
        found: Tensor = model.get_decoder()(torch.tensor([list(token_ids)]), use_cache=False).last_hidden_state[0]
    return found.float()


def train(head: ReferenceHead, model: Any, texts: Sequence[Sequence[int]], steps: int) -> float:
    """Train a head to predict the token after each pair of `texts`; return the last loss."""
    pairs = [(torch.tensor(text), states_of(model, text)) for text in texts]
    for weight in head.weights.values():
        weight.requires_grad_(True)
    optimizer = torch.optim.Adam(head.weights.values(), lr=3e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        losses = []
        for tokens, hidden in pairs:
            g = head.results(head.embedding[tokens[1:-1]], hidden[:-2])
            losses.append(functional.cross_entropy(g @ head.output.T, tokens[2:]))
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
    for weight in head.weights.values():
        weight.requires_grad_(False)
    return loss.item()


def base_of(path: Path) -> Any:
    """Load a base with transformers, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

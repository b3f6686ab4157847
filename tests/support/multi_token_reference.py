"""Heads for multi-token prediction in plain torch, float32: the oracle of drafts, and what a test trains.

Written from the definition in DeepSeek-V3 (2024, sections 2.1 and 2.2), from the reports of GLM-4.5 and ERNIE 4.5, and
from the checkpoints of Qwen3-Next and Qwen3.5. Pair t is (embedding of token t, hidden state t - 1), and has the angles
of place t - 1. Weights have the names of Qwen's head; `stored_name` gives those of a family's checkpoints.
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
Shapes = dict[str, tuple[int, ...]]
LAYER = "layers.0."
NORMS: tuple[str, ...] = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
NORMS += (f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm")
MATRICES = ("embed_tokens.weight", "lm_head.weight")
"""A head's own embedding and output matrix, if it has them."""


class ReferenceHead:
    """Qwen's head: its weights by name, and its results. Attention is gated, with norms of queries and keys by head;
    norms' weights are the factor minus one; an MLP, or experts with a shared one."""

    norms = NORMS
    norm_weights_from = 1.0
    """Number to which a norm's weight is added to give the factor."""

    def __init__(self, model: Any, weights: dict[str, Tensor]) -> None:
        self.config = model.config.get_text_config()
        self.embedding = model.get_input_embeddings().weight.detach().float()
        self.output = model.get_output_embeddings().weight.detach().float()
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.embedding, self.output = (
            self.weights.get(name, of_base)
            for name, of_base in zip(MATRICES, (self.embedding, self.output), strict=True)
        )

    @staticmethod
    def random(model: Any, seed: int = 0) -> ReferenceHead:
        """Return a head of random weights for a base."""
        config, generator = model.config.get_text_config(), torch.Generator().manual_seed(seed)
        kind = kind_of(model)
        weights = {
            name: torch.randn(shape, generator=generator) / (math.sqrt(shape[-1]) if len(shape) > 1 else 10.0)
            for name, shape in kind.shapes(config).items()
        }
        for name in weights:
            if name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight")):
                weights[name] += 1.0 - kind.norm_weights_from
        return kind(model, weights)

    @staticmethod
    def read(model: Any, base: Path) -> ReferenceHead:
        """Read the head that `save` has added to the checkpoint of a base, with its experts together or one by one."""
        kind, config = kind_of(model), model.config.get_text_config()
        layers, stored = config.num_hidden_layers, load_file(base / FILE)
        weights = {}
        for name, shape in kind.shapes(config).items():
            if (key := kind.stored_name(name, layers)) in stored:
                weights[name] = stored[key]
                continue
            prefix = key.rpartition(".")[0]
            sides = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
            parts = [[stored[f"{prefix}.{i}.{side}_proj.weight"] for side in sides] for i in range(shape[0])]
            weights[name] = torch.stack([torch.cat(own) for own in parts])
        found = {name: stored.get(kind.stored_name(name, layers)) for name in MATRICES}
        return kind(model, weights | {name: matrix for name, matrix in found.items() if matrix is not None})

    @classmethod
    def stored_name(cls, name: str, num_layers: int) -> str:
        """Return the name of a weight in checkpoints."""
        return f"mtp.{name}"

    @classmethod
    def shapes(cls, config: Any) -> Shapes:
        """Return the shape of each weight."""
        hidden = config.hidden_size
        shapes: Shapes = {f"{name}.weight": (hidden,) for name in cls.norms}
        return shapes | {"fc.weight": (hidden, 2 * hidden)} | cls.attention_shapes(config) | cls.mlp_shapes(config)

    @classmethod
    def attention_shapes(cls, config: Any) -> Shapes:
        """Return the shapes of attention's weights."""
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        own = {
            "q_norm": (dim,),
            "k_norm": (dim,),
            "q_proj": (2 * heads * dim, hidden),
            "k_proj": (kv_heads * dim, hidden),
        }
        own |= {"v_proj": (kv_heads * dim, hidden), "o_proj": (hidden, heads * dim)}
        return {f"{LAYER}self_attn.{name}.weight": shape for name, shape in own.items()}

    @classmethod
    def mlp_shapes(cls, config: Any) -> Shapes:
        """Return the shapes of the MLP's or of the experts' weights."""
        if not hasattr(config, "num_experts"):
            return gated_shapes("mlp.", config.hidden_size, config.intermediate_size)
        shapes = expert_shapes(config, config.num_experts)
        shapes |= {f"{LAYER}mlp.shared_expert_gate.weight": (1, config.hidden_size)}
        return shapes | gated_shapes("mlp.shared_expert.", config.hidden_size, config.shared_expert_intermediate_size)

    def save(
        self, base: Path, dtype: torch.dtype = torch.float32, *, one_by_one: bool = False, with_copies: bool = False
    ) -> None:
        """Add the head to the checkpoint of a base; with `one_by_one` its experts have separate tensors, with
        `with_copies` it has the base's embedding and output matrix once more."""
        layers, tensors = self.config.num_hidden_layers, load_file(base / FILE)
        own = dict(self.weights)
        if with_copies:
            own |= dict(zip(MATRICES, (self.embedding, self.output), strict=True))
        for name, weight in own.items():
            key = self.stored_name(name, layers)
            if one_by_one and ".experts." in name:
                prefix = key.rpartition(".")[0]
                for expert, matrix in enumerate(weight):
                    sides = dict(zip(("gate", "up"), matrix.chunk(2), strict=True))
                    for side, part in (sides if name.endswith("gate_up_proj") else {"down": matrix}).items():
                        tensors[f"{prefix}.{expert}.{side}_proj.weight"] = part.to(dtype).contiguous()
            else:
                tensors[key] = weight.detach().to(dtype).clone()
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
        return self._last_norm(u)

    def _last_norm(self, u: Tensor) -> Tensor:
        return self._norm(u, "norm")

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.config.num_attention_heads
        query, gate = self._linear(x, "self_attn.q_proj").view(len(x), heads, -1).chunk(2, dim=-1)
        query = self._rotate(self._norm(query, "layers.0.self_attn.q_norm"))
        key = self._rotate(self._norm(self._heads(x, "k_proj"), "layers.0.self_attn.k_norm"))
        seen = see(query, key, self._heads(x, "v_proj"))
        return self._linear((seen * gate.sigmoid()).flatten(1), "self_attn.o_proj")

    def _heads(self, x: Tensor, projection: str) -> Tensor:
        return self._linear(x, f"self_attn.{projection}").view(len(x), -1, self.config.head_dim)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate the first elements `[n, heads, dim]` by halves."""
        rope = self.config.rope_parameters
        width = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        angles = angles_of(len(x), width, rope["rope_theta"]).repeat(1, 2)[:, None]
        turned, rest = x[..., :width], x[..., width:]
        halves = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
        return torch.cat((turned * angles.cos() + halves * angles.sin(), rest), dim=-1)

    def _rotate_pairs(self, x: Tensor) -> Tensor:
        """Rotate neighbouring elements of `[n, heads, dim]`."""
        angles = angles_of(len(x), x.shape[-1], self.config.rope_parameters["rope_theta"])[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()
        return torch.stack(turned, dim=-1).flatten(-2)

    def _mix(self, x: Tensor) -> Tensor:
        if "layers.0.mlp.gate.weight" not in self.weights:
            return self._gated(x, "mlp.")
        shared = self._gated(x, "mlp.shared_expert.") * self._linear(x, "mlp.shared_expert_gate").sigmoid()
        shares, chosen = self._linear(x, "mlp.gate").softmax(-1).topk(self.config.num_experts_per_tok)
        return shared + self._experts(x, shares / shares.sum(-1, keepdim=True), chosen)

    def _experts(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        gate_up, down = (self.weights[f"layers.0.mlp.experts.{name}"][chosen] for name in ("gate_up_proj", "down_proj"))
        gate, up = torch.einsum("nd,nkod->nko", x, gate_up).chunk(2, dim=-1)
        own = torch.einsum("nko,nkdo->nkd", functional.silu(gate) * up, down)
        return (own * shares[..., None]).sum(1)

    def _gated(self, x: Tensor, part: str) -> Tensor:
        gate, up = (self._linear(x, f"{part}{side}_proj") for side in ("gate", "up"))
        return self._linear(functional.silu(gate) * up, f"{part}down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.weights[f"layers.0.{name}.weight"].T
        return out + self.weights.get(f"layers.0.{name}.bias", torch.zeros(()))

    def _norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        factor = self.norm_weights_from + self.weights[f"{name}.weight"]
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (eps or self.config.rms_norm_eps)) * factor


class GlmHead(ReferenceHead):
    """GLM-4.5's head, saved as the layer after the base's last: grouped queries, half of each head rotated, experts
    chosen by sigmoids and a bias (DeepSeek-V3, equations 13 to 16)."""

    norm_weights_from = 0.0

    @classmethod
    def stored_name(cls, name: str, num_layers: int) -> str:
        parts = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj"}
        parts |= {"norm": "shared_head.norm", "lm_head": "shared_head.head"}
        part, _, rest = name.removeprefix(LAYER).partition(".")
        return f"model.layers.{num_layers}.{part if name.startswith(LAYER) else parts.get(part, part)}.{rest}"

    @classmethod
    def attention_shapes(cls, config: Any) -> Shapes:
        hidden, dim = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        shapes: Shapes = {f"{LAYER}self_attn.{name}.weight": (count, hidden) for name, count in rows.items()}
        if config.attention_bias:
            shapes |= {f"{LAYER}self_attn.{name}.bias": (count,) for name, count in rows.items()}
        if config.use_qk_norm:
            shapes |= {f"{LAYER}self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        return shapes | {f"{LAYER}self_attn.o_proj.weight": (hidden, heads * dim)}

    @classmethod
    def mlp_shapes(cls, config: Any) -> Shapes:
        shapes = expert_shapes(config, config.n_routed_experts)
        shapes |= {f"{LAYER}mlp.gate.e_score_correction_bias": (config.n_routed_experts,)}
        shared = config.n_shared_experts * config.moe_intermediate_size
        return shapes | gated_shapes("mlp.shared_experts.", config.hidden_size, shared)

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(x, f"{name}_proj") for name in "qkv")
        if self.config.use_qk_norm:
            query, key = (self._norm(rows, f"layers.0.self_attn.{n}_norm") for n, rows in (("q", query), ("k", key)))
        return self._linear(see(self._rotate(query), self._rotate(key), value).flatten(1), "self_attn.o_proj")

    def _mix(self, x: Tensor) -> Tensor:
        config, affinity = self.config, self._linear(x, "mlp.gate").sigmoid()
        biased = affinity + self.weights["layers.0.mlp.gate.e_score_correction_bias"]
        groups = biased.view(len(x), config.n_group, -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        is_open = torch.zeros(len(x), config.n_group, dtype=torch.bool).scatter(1, best, True)
        chosen = groups.masked_fill(~is_open[..., None], -math.inf).flatten(1).topk(config.num_experts_per_tok).indices
        shares = affinity.gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) if config.norm_topk_prob else shares
        return self._gated(x, "mlp.shared_experts.") + self._experts(x, shares * config.routed_scaling_factor, chosen)


class LatentHead(GlmHead):
    """DeepSeek-V3's head, saved as GLM's: multi-head latent attention (DeepSeek-V3, equations 1 to 11)."""

    @classmethod
    def attention_shapes(cls, config: Any) -> Shapes:
        hidden, heads, rank, query_rank = (
            config.hidden_size,
            config.num_attention_heads,
            config.kv_lora_rank,
            config.q_lora_rank,
        )
        own = {
            "q_a_proj": (query_rank, hidden),
            "q_a_layernorm": (query_rank,),
            "q_b_proj": (heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), query_rank),
            "kv_a_proj_with_mqa": (rank + config.qk_rope_head_dim, hidden),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
            "o_proj": (hidden, heads * config.v_head_dim),
        }
        return {f"{LAYER}self_attn.{name}.weight": shape for name, shape in own.items()}

    def _attend(self, x: Tensor) -> Tensor:
        config, attention = self.config, "layers.0.self_attn."
        rotary, plain, heads = config.qk_rope_head_dim, config.qk_nope_head_dim, config.num_attention_heads
        compressed = self._norm(self._linear(x, "self_attn.q_a_proj"), f"{attention}q_a_layernorm", 1e-6)
        query = self._linear(compressed, "self_attn.q_b_proj").view(len(x), heads, -1)
        query = torch.cat((query[..., :plain], self._rotate_pairs(query[..., plain:])), dim=-1)
        latent, shared = self._linear(x, "self_attn.kv_a_proj_with_mqa").split((config.kv_lora_rank, rotary), dim=-1)
        latent = self._norm(latent, f"{attention}kv_a_layernorm", 1e-6)
        key, value = (
            self._linear(latent, "self_attn.kv_b_proj")
            .view(len(x), heads, -1)
            .split((plain, config.v_head_dim), dim=-1)
        )
        key = torch.cat((key, self._rotate_pairs(shared[:, None]).expand(-1, heads, -1)), dim=-1)
        return self._linear(see(query, key, value).flatten(1), "self_attn.o_proj")


class ErnieHead(ReferenceHead):
    """ERNIE 4.5's head: a dense layer that rotates neighbouring elements, and then the base's last norm."""

    norms = tuple(name for name in NORMS if name != "norm")
    norm_weights_from = 0.0

    def __init__(self, model: Any, weights: dict[str, Tensor]) -> None:
        super().__init__(model, weights)
        self.base_norm = model.get_decoder().norm.weight.detach().float()

    @classmethod
    def stored_name(cls, name: str, num_layers: int) -> str:
        parts = {"pre_fc_norm_embedding": "emb_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "linear_proj"}
        if name.startswith(LAYER):
            return f"model.mtp_block.0.{name.removeprefix(LAYER)}"
        part, _, rest = name.partition(".")
        return f"model.mtp_{parts.get(part, part)}.0.{rest}"

    @classmethod
    def attention_shapes(cls, config: Any) -> Shapes:
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        dim = cls.head_dim_of(config)
        own = {"q_proj": (heads * dim, hidden), "k_proj": (kv_heads * dim, hidden), "v_proj": (kv_heads * dim, hidden)}
        return {f"{LAYER}self_attn.{n}.weight": s for n, s in (own | {"o_proj": (hidden, heads * dim)}).items()}

    @classmethod
    def mlp_shapes(cls, config: Any) -> Shapes:
        return gated_shapes("mlp.", config.hidden_size, config.intermediate_size)

    @staticmethod
    def head_dim_of(config: Any) -> int:
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def _heads(self, x: Tensor, projection: str) -> Tensor:
        return self._linear(x, f"self_attn.{projection}").view(len(x), -1, self.head_dim_of(self.config))

    def _attend(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(x, f"{name}_proj") for name in "qkv")
        seen = see(self._rotate_pairs(query), self._rotate_pairs(key), value)
        return self._linear(seen.flatten(1), "self_attn.o_proj")

    def _last_norm(self, u: Tensor) -> Tensor:
        return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * self.base_norm


def kind_of(model: Any) -> type[ReferenceHead]:
    """Return the head of a base's family."""
    kinds = {"glm4_moe": GlmHead, "deepseek_v3": LatentHead, "glm4_moe_lite": LatentHead, "ernie4_5_moe": ErnieHead}
    return kinds.get(model.config.get_text_config().model_type, ReferenceHead)


def gated_shapes(part: str, hidden: int, width: int) -> Shapes:
    """Return the shapes of a gated MLP's weights."""
    shapes: Shapes = {f"{LAYER}{part}{side}_proj.weight": (width, hidden) for side in ("gate", "up")}
    return shapes | {f"{LAYER}{part}down_proj.weight": (hidden, width)}


def expert_shapes(config: Any, experts: int) -> Shapes:
    """Return the shapes of the weights of stacked experts and of what chooses them."""
    hidden, width = config.hidden_size, config.moe_intermediate_size
    shapes: Shapes = {f"{LAYER}mlp.gate.weight": (experts, hidden)}
    shapes |= {f"{LAYER}mlp.experts.gate_up_proj": (experts, 2 * width, hidden)}
    return shapes | {f"{LAYER}mlp.experts.down_proj": (experts, hidden, width)}


def angles_of(count: int, width: int, theta: float) -> Tensor:
    """Return the angles `[count, width / 2]` of places 0 to count - 1."""
    return torch.arange(count)[:, None] * theta ** (-torch.arange(0, width, 2) / width)


def see(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention of `[n, heads, dim]` over `[n, kv heads, dim]`: `[n, heads, value dim]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(torch.ones(len(query), len(key), dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


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

"""A base with a compressed KV, activated LoRAs on its expansion, and PEFT's tokens for them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from adapter_zoo import Asked, Zoo
from peft.tuners.lora.variants import calculate_alora_offsets

from loramux_adapters.latent import rows_expanded

INVOKE = (90, 91)
TEXT = tuple(range(5, 65))
PROMPTS = {
    "a short end": (*TEXT[:50], *INVOKE, 3),
    "a long end": (*TEXT[:9], *INVOKE, *TEXT[9:59], 4),
    "at a page's beginning": (*TEXT[:32], *INVOKE, *TEXT[:20]),
    "at once": (*INVOKE, *TEXT[:40]),
    "never": TEXT[:40],
}
LINEARS = r".*\.self_attn\.[a-z_]+_(proj|mqa)"
ACTIVATED = {"r": 8, "lora_alpha": 32, "target_modules": LINEARS, "alora_invocation_tokens": list(INVOKE)}
ADAPTERS = {
    "plain": {"r": 5, "lora_alpha": 10, "target_modules": LINEARS},
    "activated": ACTIVATED,
    "activated_bias": ACTIVATED | {"r": 20, "target_modules": ["kv_b_proj", "o_proj"], "lora_bias": True},
}


class ActivatedZoo(Zoo):
    """A base with a compressed KV, and adapters on its expansion."""

    def __init__(self, family: str, root: Path) -> None:
        super().__init__(family, root)
        for seed, (name, recipe) in enumerate(ADAPTERS.items()):
            self.make_adapter(name, recipe, seed)

    @torch.no_grad()
    def generate(self, asked: Asked, cache: transformers.Cache | None = None) -> tuple[list[int], torch.Tensor]:
        """PEFT's greedy tokens without a cache. transformers caches the compressed KV and expands the whole of it for
        each token, and PEFT's `generate` then counts the activated tokens from the wrong end."""
        model, ids, logits = self._reference, torch.tensor([asked.prompt]), []
        assert model is not None
        name = asked.adapter or "plain"
        model.set_adapter(name)
        [offset] = calculate_alora_offsets(model.peft_config, name, ids)
        with rows_expanded(model), model.disable_adapter() if asked.adapter is None else nullcontext():
            for number in range(asked.output):
                activated = None if offset is None else offset + number
                keywords = {} if name == "plain" else {"alora_offsets": [activated]}
                logits.append(model(input_ids=ids, use_cache=False, **keywords).logits[:, -1])
                ids = torch.cat((ids, logits[-1].argmax(-1, keepdim=True)), dim=1)
        return ids[0, len(asked.prompt) :].tolist(), torch.cat(logits)


def asked_of(models: Iterable[str | None], turn: int = 0) -> list[Asked]:
    return [Asked(f"{turn} {model} {name}", model, prompt, 5) for name, prompt in PROMPTS.items() for model in models]


def check(zoo: Zoo, asked: list[Asked], got: dict[str, list[int]]) -> None:
    for request in asked:
        assert got[request.name] == zoo.answer(replace(request, name="")), request

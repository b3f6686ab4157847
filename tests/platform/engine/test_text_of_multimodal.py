"""Models of text and images: their text, with adapters trained on the whole model, token for token with PEFT."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
from adapter_zoo import NOT_FOR_PEFT, WITH_IMAGES, Asked, serve
from formats import FormatZoo
from preempting import preempting

LORA = {"lora_alpha": 10, "task_type": "CAUSAL_LM"}
RECIPES = {
    "text": peft.LoraConfig(
        r=5, target_modules=r".*language_model.*\.(q_proj|v_proj|o_proj|in_proj_qkv|out_proj)", **LORA
    ),
    "names": peft.LoraConfig(r=18, use_rslora=True, target_modules=["k_proj", "o_proj"], **LORA),
}


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_multimodal_base_answers_text_as_peft_does(tmp_path: Path, family: str) -> None:
    zoo = FormatZoo(family, tmp_path, [])
    for seed, (name, config) in enumerate(RECIPES.items()):
        fields = {k: v for k, v in config.to_dict().items() if k in KEPT}
        fields["exclude_modules"] = NOT_FOR_PEFT.get(family)
        zoo.make_format(name, peft.LoraConfig(**fields), seed)
    names = [None, *RECIPES]
    asked = [Asked(f"r{i}", names[i % 3], tuple(range(3 + i, 5 + 7 * i)), 6) for i in range(6)]
    assert len({tuple(zoo.answer(Asked("x", name, (5, 6, 7, 8), 8))) for name in names}) == len(names)
    wanted = {request.name: zoo.answer(request) for request in asked}
    for name in RECIPES:
        zoo.rename_adapter(name)
    engine = preempting(zoo.engine(max_num_batched_tokens=29))
    assert serve(zoo, engine, asked, arrivals=[i // 4 for i in range(len(asked))]) == wanted
    assert engine.stats().preemptions > 0


KEPT = set(peft.LoraConfig.__dataclass_fields__) - {"peft_type", "runtime_config"}

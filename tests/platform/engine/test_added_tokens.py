"""Adapters trained on a resized embedding: their tokens exist for their rows alone, as in PEFT on a resized base."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from adapter_zoo import ON_RANKS, Asked, serve, to_request
from formats import LORA, FormatZoo
from safetensors.torch import load_file, save_file

from loramux.catalog.validation.files import examine
from loramux.catalog.validation.jobs import FilesJob, FilesSetup
from loramux_adapters.base import describe_base
from loramux_adapters.errors import AdapterRejected
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, PlanLimits, validate_adapter

BASE_TOKENS, ADDED = 97, 8
NEW = tuple(range(BASE_TOKENS, BASE_TOKENS + ADDED))
ON = {"target_modules": ["q_proj", "o_proj", "down_proj"]}

ADAPTERS: dict[str, tuple[int, peft.LoraConfig]] = {
    "saved": (105, peft.LoraConfig(**LORA | ON, modules_to_save=["embed_tokens", "lm_head"])),
    "saved embedding": (105, peft.LoraConfig(**LORA | ON, modules_to_save=["embed_tokens"])),
    "copied": (101, peft.LoraConfig(**LORA | ON)),
    "trained tokens": (105, peft.LoraConfig(**LORA | ON, trainable_token_indices=[5, *NEW[:3]])),
    "cut": (90, peft.LoraConfig(**LORA | ON, modules_to_save=["embed_tokens", "lm_head"])),
    "cut copy": (91, peft.LoraConfig(**LORA | ON)),
}
"""Tokens after the resizing, and the configuration."""
PLAIN = {"plain": peft.LoraConfig(**LORA | ON), "rows": peft.LoraConfig(**LORA | ON, trainable_token_indices=[3, 50])}


class ResizedZoo(FormatZoo):
    """A zoo whose adapters were trained on bases of different sizes."""

    def __init__(self, family: str, root: Path, tied: bool) -> None:
        super().__init__(family, root, list(PLAIN), tied=tied)
        self.sizes: dict[str | None, int] = {}
        self._making: str | None = None
        for seed, (name, config) in enumerate(PLAIN.items()):
            self.make_format(name, config, seed)
        for seed, (name, (size, config)) in enumerate(ADAPTERS.items(), start=7):
            self.sizes[name], self._making = size, name
            self.make_format(name, config, seed)
            self._making = None

    def _base(self) -> torch.nn.Module:
        model = super()._base()
        if (size := self.sizes.get(self._making)) is not None:
            torch.manual_seed(size)
            model.resize_token_embeddings(size)
            with torch.no_grad():  # the new rows are drawn around the others' mean; here they must matter
                for matrix in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
                    matrix[BASE_TOKENS:] += torch.randn_like(matrix[BASE_TOKENS:]) * matrix.std()
        return model

    def _model(self, name: str | None) -> torch.nn.Module:
        self._making = name
        try:
            return super()._model(name)
        finally:
            self._making = None


@pytest.fixture(
    scope="module", params=[("llama", False), ("qwen2", True), ("gemma2", True)], ids=["untied", "tied", "soft cap"]
)
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ResizedZoo:
    family, tied = request.param
    return ResizedZoo(family, tmp_path_factory.mktemp("resized"), tied)


def prompt_for(zoo: ResizedZoo, name: str | None, seed: int) -> tuple[int, ...]:
    """Return a prompt with the tokens that the adapter added."""
    size = zoo.sizes.get(name, BASE_TOKENS)
    drawn = torch.randint(3, min(size, BASE_TOKENS), (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    return (*drawn[:4], *range(BASE_TOKENS, size), *drawn[4:])


@ON_RANKS
def test_added_tokens_with_other_adapters_answer_as_peft_does(zoo: ResizedZoo, ranks: int) -> None:
    names = [*ADAPTERS, *PLAIN, None]
    asked = [Asked(f"{name} {i}", name, prompt_for(zoo, name, i), 10) for i in range(3) for name in names]
    engine = zoo.engine(max_num_batched_tokens=29, pool_bytes=8 << 20, tensor_parallel_size=ranks)
    got = serve(zoo, engine, asked, arrivals=[i // 3 for i in range(len(asked))])
    for request in asked:
        assert got[request.name] == zoo.answer(request), request.adapter
    assert engine.stats().max_distinct_adapters_beside_base >= 4
    wide = [token for request in asked for token in got[request.name] if token >= BASE_TOKENS]
    assert wide, "some answers have added tokens"
    engine.close()


def test_added_tokens_never_come_out_of_another_s_rows(zoo: ResizedZoo) -> None:
    """At a temperature at which every token that exists is drawn soon."""
    engine = zoo.engine(pool_bytes=8 << 20)
    requests = []
    for name in ("saved", "plain", "cut", None):
        asked = Asked(str(name), name, tuple(range(5, 12)), 60)
        requests.append(to_request(zoo, asked, temperature=2.0, seed=5))
    for request in requests:
        engine.submit(request)
    drawn: dict[str, set[int]] = {request.id: set() for request in requests}
    while not engine.is_idle:
        report = engine.step()
        for event in report.events if report else []:
            assert event.fault is None, event.fault
            if event.token_id is not None:
                drawn[event.request_id].add(event.token_id)
    assert max(drawn["plain"]) < BASE_TOKENS
    assert max(drawn["None"]) < BASE_TOKENS
    assert max(drawn["cut"]) < 90


def test_added_tokens_are_counted_by_the_report(zoo: ResizedZoo) -> None:
    setup = FilesSetup(base=describe_base(zoo.base), base_names=("base",), serving="F32")
    for name in ("saved", "copied", "trained tokens", "cut", "plain"):
        report = examine(FilesJob(folder=str(zoo.adapters / name), limits=PlanLimits()), setup)
        assert report.refusal is None, report.refusal
        assert report.found is not None
        assert report.found.tokens == zoo.sizes.get(name, BASE_TOKENS)


def _refusal(zoo: ResizedZoo, folder: Path) -> AdapterRejected:
    with pytest.raises(AdapterRejected) as caught:
        validate_adapter(folder, describe_base(zoo.base), PlanLimits())
    return caught.value


def test_resized_adapter_without_the_head_s_rows_is_refused(zoo: ResizedZoo, tmp_path: Path) -> None:
    tensors = load_file(zoo.adapters / "copied" / WEIGHTS_NAME)
    kept = {key: tensor for key, tensor in tensors.items() if "lm_head" not in key}
    save_file(kept, tmp_path / WEIGHTS_NAME)
    (tmp_path / CONFIG_NAME).write_bytes((zoo.adapters / "copied" / CONFIG_NAME).read_bytes())
    assert _refusal(zoo, tmp_path).code == "tensors_missing"


def test_resized_adapter_with_matrices_of_two_sizes_is_refused(zoo: ResizedZoo, tmp_path: Path) -> None:
    tensors = load_file(zoo.adapters / "copied" / WEIGHTS_NAME)
    key = "base_model.model.lm_head.weight"
    save_file(tensors | {key: tensors[key][:99].clone()}, tmp_path / WEIGHTS_NAME)
    (tmp_path / CONFIG_NAME).write_bytes((zoo.adapters / "copied" / CONFIG_NAME).read_bytes())
    assert _refusal(zoo, tmp_path).code == "shape_mismatch"


def test_resized_adapter_with_factors_of_the_head_is_refused(zoo: ResizedZoo, tmp_path: Path) -> None:
    document = json.loads((zoo.adapters / "copied" / CONFIG_NAME).read_text())
    (tmp_path / CONFIG_NAME).write_text(json.dumps(document | {"target_modules": ["q_proj", "lm_head"]}))
    (tmp_path / WEIGHTS_NAME).write_bytes((zoo.adapters / "copied" / WEIGHTS_NAME).read_bytes())
    refusal = _refusal(zoo, tmp_path)
    assert (refusal.code, refusal.field) == ("field_unsupported", "target_modules")


def test_resized_copy_of_another_base_is_refused(zoo: ResizedZoo) -> None:
    tensors = load_file(zoo.adapters / "copied" / WEIGHTS_NAME)
    key = "base_model.model.model.embed_tokens.weight"
    other = tensors[key].clone()
    other[3] *= 1.01
    folder = zoo.adapters / "other base"
    folder.mkdir()
    save_file(tensors | {key: other}, folder / WEIGHTS_NAME)
    (folder / CONFIG_NAME).write_bytes((zoo.adapters / "copied" / CONFIG_NAME).read_bytes())
    with pytest.raises(AssertionError, match=r"embed_tokens.* not this base's"):
        serve(zoo, zoo.engine(), [Asked("one", "other base", (5, 6), 2)])

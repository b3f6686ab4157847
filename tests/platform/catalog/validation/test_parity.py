"""The parity check passes sound adapters and detects wrong results."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from activated_latents import LINEARS
from adapter_zoo import RECIPES, Zoo
from safetensors.torch import load_file, save_file
from task_adapters import TaskAdapter

from loramux.catalog.validation import parity
from loramux.catalog.validation.jobs import ParityJob, ParitySetup, ValidationReport
from loramux.catalog.validation.parity import ParityComparison
from loramux.catalog.validation.parity_tokens import compare_tokens
from loramux.catalog.validation.validator import Validator
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import AdapterLimits, EngineSettings, ModelSettings, ValidationSettings
from loramux.engine.memory import host_memory
from loramux_adapters.bank import PagedRows, ResidentClassifier
from loramux_adapters.base import describe_base
from loramux_adapters.components import PREFIX
from loramux_adapters.convert.renaming import rename_adapter
from loramux_adapters.plan import WEIGHTS_NAME, PlanLimits
from loramux_adapters.weights import AdapterWeights

LIMITS = PlanLimits(max_rank=64)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    zoo = Zoo("llama", tmp_path_factory.mktemp("llama"))
    zoo.make_adapters()
    return zoo


def setup_of(zoo: Zoo, whole_model_bytes: int, memory_bytes: int = 1 << 30) -> ParitySetup:
    base = describe_base(zoo.base)
    return ParitySetup(
        model_dir=str(zoo.base),
        base=base,
        adapters=AdapterLimits(max_rank=64),
        memory_bytes=memory_bytes,
        whole_model_bytes=whole_model_bytes,
    )


@pytest.fixture(scope="module")
def comparison(zoo: Zoo) -> ParityComparison:
    return ParityComparison.over(setup_of(zoo, 1 << 30))


def report_on(comparison: ParityComparison, folder: Path) -> ValidationReport:
    """Compare as a job does: PEFT modifies a copy of the reference model."""
    if comparison.whole is not None:
        whole = dataclasses.replace(comparison.whole, reference=copy.deepcopy(comparison.whole.reference))
        comparison = dataclasses.replace(comparison, whole=whole)
    return comparison.report(ParityJob(uploaded=str(folder), served=str(folder), limits=LIMITS))


def outcomes(report: ValidationReport) -> dict[str, str]:
    return {check.name: check.outcome for check in report.checks}


def rewritten(folder: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / WEIGHTS_NAME)
    save_file({name: change(name, tensor) for name, tensor in tensors.items()}, target / WEIGHTS_NAME)
    return target


@pytest.mark.parametrize("recipe", RECIPES)
def test_parity_of_a_sound_adapter_passes(comparison: ParityComparison, zoo: Zoo, recipe: str) -> None:
    report = report_on(comparison, zoo.adapters / recipe)
    assert report.refusal is None
    assert outcomes(report) == {"parity_of_layers": "passed", "parity_of_tokens": "passed"}
    figures = {check.name: check.figures for check in report.checks}
    assert figures["parity_of_layers"]["largest_error"] < 0.1
    assert figures["parity_of_layers"]["linears"] >= 2
    assert figures["parity_of_tokens"]["tokens"] == 24
    assert figures["parity_of_tokens"]["differing"] == 0
    assert figures["parity_of_tokens"]["largest_logprob_error"] < 1e-4
    assert figures["parity_of_tokens"]["mean_divergence_from_base"] > 1e-3


@pytest.mark.parametrize(("family", "linears"), [("llama", "all-linear"), ("deepseek_v2", LINEARS)])
def test_parity_of_an_activated_lora_is_compared_after_its_invocation(
    tmp_path: Path, family: str, linears: str
) -> None:
    """On a compressed KV its expansion is among the linears."""
    zoo = Zoo(family, tmp_path)
    recipe = {"r": 8, "lora_alpha": 16, "target_modules": linears, "alora_invocation_tokens": [9, 8]}
    zoo.make_adapter("activated", recipe, seed=3)
    report = report_on(ParityComparison.over(setup_of(zoo, 1 << 30)), zoo.adapters / "activated")
    assert outcomes(report) == {"parity_of_layers": "passed", "parity_of_tokens": "passed"}
    figures = {check.name: check.figures for check in report.checks}
    assert figures["parity_of_layers"]["largest_contribution"] > 0
    assert figures["parity_of_tokens"]["mean_divergence_from_base"] > 1e-3


def test_parity_on_a_large_base_compares_layers_alone(zoo: Zoo) -> None:
    report = report_on(ParityComparison.over(setup_of(zoo, 0)), zoo.adapters / "patterns")
    assert outcomes(report) == {"parity_of_layers": "passed", "parity_of_tokens": "not_run"}
    assert "too large" in report.checks[1].detail


def test_parity_linears_beyond_the_memory_are_left_out_and_counted(zoo: Zoo) -> None:
    a_square = 3 * 4 * 64 * 64
    some = report_on(ParityComparison.over(setup_of(zoo, 0, a_square)), zoo.adapters / "patterns").checks[0]
    assert (some.outcome, some.figures["linears"]) == ("passed", 3)
    assert "3 of 6 linears" in some.detail
    none = report_on(ParityComparison.over(setup_of(zoo, 0, a_square - 1)), zoo.adapters / "patterns").checks[0]
    assert (none.outcome, "parity_memory_bytes" in none.detail) == ("not_run", True)


def wrongly_scaled(weights: AdapterWeights) -> AdapterWeights:
    modules = {name: dataclasses.replace(pair, scale=pair.scale * 1.05) for name, pair in weights.modules.items()}
    return dataclasses.replace(weights, modules=modules)


def test_parity_wrong_scale_is_found_in_layers(
    comparison: ParityComparison, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = parity.read_weights
    monkeypatch.setattr(parity, "read_weights", lambda *args: wrongly_scaled(read(*args)))
    report = report_on(comparison, zoo.adapters / "rslora")
    assert outcomes(report) == {"parity_of_layers": "failed"}
    assert report.refusal is not None
    assert report.refusal.code == "parity_failed"
    assert "times as far from PEFT's as rounding explains" in report.refusal.message


def test_parity_wrong_scale_is_found_in_tokens(
    comparison: ParityComparison, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = host_memory.load_adapter
    monkeypatch.setattr(host_memory, "load_adapter", lambda *args: wrongly_scaled(load(*args)))
    report = report_on(comparison, zoo.adapters / "plain")
    assert outcomes(report) == {"parity_of_layers": "passed", "parity_of_tokens": "failed"}
    assert report.refusal is not None
    assert report.refusal.code == "parity_failed"
    assert "log probabilities are up to" in report.refusal.message


def test_parity_products_that_are_not_finite_are_refused(
    comparison: ParityComparison, zoo: Zoo, tmp_path: Path
) -> None:
    folder = rewritten(zoo.adapters / "attention", tmp_path / "huge", lambda _, tensor: tensor * 1e25)
    report = report_on(comparison, folder)
    assert report.refusal is not None
    assert report.refusal.code == "outputs_not_finite"


def test_parity_of_an_adapter_without_effect_warns(comparison: ParityComparison, zoo: Zoo, tmp_path: Path) -> None:
    def untrained(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor) if "lora_B" in name else tensor

    report = report_on(comparison, rewritten(zoo.adapters / "attention", tmp_path / "untrained", untrained))
    assert report.refusal is None
    assert [warned.code for warned in report.warnings] == ["no_effect"]
    assert report.checks[1].figures["mean_divergence_from_base"] == pytest.approx(0, abs=1e-9)


def test_parity_tie_is_no_difference_and_another_token_is() -> None:
    logits = torch.tensor([[1.0, 1.0001, 0.0], [3.0, 0.0, 0.0]])
    logprobs = logits.log_softmax(-1)
    tied = compare_tokens([0, 0], [float(logprobs[0, 0]), float(logprobs[1, 0])], logits)
    assert (tied["ties"], tied["differing"]) == (1, 0)
    other = compare_tokens([0, 2], [float(logprobs[0, 0]), float(logprobs[1, 2])], logits)
    assert (other["ties"], other["differing"]) == (1, 1)
    assert compare_tokens([1, 0], [-0.5, float(logprobs[1, 0])], logits)["largest_logprob_error"] > 0.1


def test_parity_is_part_of_an_uploads_validation(zoo: Zoo, tmp_path: Path) -> None:
    """In the processes of a server; PEFT is loaded there and not here."""
    settings: dict[str, Any] = {"model": ModelSettings(path=str(zoo.base), served_model_name="base")}
    huge = rewritten(zoo.adapters / "attention", tmp_path / "huge", lambda _, tensor: tensor * 1e25)
    with closing(Validator(Settings(**settings), describe_base(zoo.base), "float32")) as validator:
        good, bad = validator.examine(zoo.adapters / "plain", LIMITS), validator.examine(huge, LIMITS)
    with closing(
        Validator(Settings(**settings, validation=ValidationSettings(parity=False)), describe_base(zoo.base), "float32")
    ) as validator:
        without = validator.examine(zoo.adapters / "plain", LIMITS)
    files = ["config", "header", "tensors", "values"]
    assert [check.name for check in good.checks] == [*files, "parity_of_layers", "parity_of_tokens"]
    assert good.refusal is None
    assert bad.refusal is not None
    assert bad.refusal.code == "outputs_not_finite"
    assert [check.name for check in without.checks] == files


def test_parity_runs_with_the_serving_engines_block_size_or_is_refused_by_name(tmp_path: Path) -> None:
    """A wide base with few keys and values: the default page is too small for its adapters."""
    wide = Zoo("llama", tmp_path, intermediate_size=512, num_key_value_heads=1)
    wide.make_adapter("plain", RECIPES["plain"], 1)
    reports = {}
    for block_size in (128, None, 16):
        settings = Settings(
            model=ModelSettings(path=str(wide.base), served_model_name="base"),
            engine=EngineSettings(block_size=block_size),
        )
        with closing(Validator(settings, describe_base(wide.base), "float32")) as validator:
            reports[block_size] = validator.examine(wide.adapters / "plain", LIMITS)
    assert reports[128].refusal is None, reports[128].refusal
    assert outcomes(reports[128])["parity_of_tokens"] == "passed"
    assert reports[None].refusal is None, reports[None].refusal
    refusal = reports[16].refusal
    assert refusal is not None
    assert refusal.code == "validation_impossible"
    assert "engine.block_size = 16 makes pages too small" in refusal.message


@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_parity_of_a_classifier_compares_its_numbers(
    comparison: ParityComparison, zoo: Zoo, tmp_path: Path, num_labels: int, of_tokens: bool
) -> None:
    report = report_on(comparison, TaskAdapter(zoo.base, tmp_path / "c", 1, num_labels, of_tokens=of_tokens).folder)
    assert report.refusal is None, report.refusal
    assert outcomes(report) == {"parity_of_layers": "passed", "parity_of_tokens": "passed"}
    assert report.checks[1].figures["vectors"] == 2
    assert report.checks[1].figures["largest_error"] < 0.1


def test_parity_of_a_classifier_served_wrong_fails(
    comparison: ParityComparison, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TaskAdapter(zoo.base, tmp_path / "c", 1, 3).folder
    right = PagedRows.times_rows
    monkeypatch.setattr(PagedRows, "times_rows", lambda rows, x: right(rows, x).flip(-1))
    report = report_on(comparison, folder)
    assert outcomes(report) == {"parity_of_layers": "passed", "parity_of_tokens": "failed"}
    assert report.refusal.code == "parity_failed"


def test_parity_of_a_classifier_of_tokens_served_without_its_bias_fails(
    comparison: ParityComparison, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TaskAdapter(zoo.base, tmp_path / "c", 1, 3, of_tokens=True).folder
    right = ResidentClassifier.logits
    monkeypatch.setattr(ResidentClassifier, "logits", lambda head, x: right(head, x) - right(head, 0 * x))
    assert outcomes(report_on(comparison, folder)) == {"parity_of_layers": "passed", "parity_of_tokens": "failed"}


@pytest.mark.parametrize(
    ("family", "whole"),
    [("falcon_h1", True), ("falcon_h1", False), ("bamba", True), ("bamba", False), ("nemotron_h", True)],
)
def test_parity_of_out_proj_of_mamba_layers_is_compared_though_peft_refuses_to_train_it(
    tmp_path: Path, family: str, whole: bool
) -> None:
    """The folder is what other trainers write, with module names as PEFT gives them."""
    zoo = Zoo(family, tmp_path)
    setup, folder = setup_of(zoo, (1 << 30) * whole), tmp_path / "adapter"
    folder.mkdir()
    tensors = {}
    for name, shape in setup.base.modules.items():
        if name.endswith((".in_proj", ".out_proj")):
            tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(3, shape.in_features) * 0.1
            tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(shape.out_features, 3) * 0.1
    save_file(tensors, folder / WEIGHTS_NAME)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["in_proj", "out_proj"], task_type="CAUSAL_LM")
    config.save_pretrained(folder)
    report = report_on(ParityComparison.over(setup), folder)
    assert report.refusal is None, report.refusal
    named_otherwise = family == "nemotron_h"  # its checkpoints have other names than transformers' modules
    assert outcomes(report)["parity_of_layers"] == ("not_run" if named_otherwise else "passed")
    if whole:
        assert outcomes(report)["parity_of_tokens"] == "passed"
        assert report.checks[1].figures["mean_divergence_from_base"] > 0


@pytest.mark.parametrize(("family", "of_tower"), [("qwen2_5_vl", 2 * 5 + 2), ("qwen3_vl", 2 * 4 + 2 + 2 * 2)])
def test_parity_of_an_adapter_of_the_vision_tower_compares_linears_of_tower_and_connector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, of_tower: int
) -> None:
    zoo = Zoo(family, tmp_path)
    zoo.make_adapter("tower", {"r": 5, "lora_alpha": 7, "target_modules": "all-linear", "use_dora": True}, seed=3)
    comparison = ParityComparison.over(setup_of(zoo, 1 << 30))
    report = report_on(comparison, zoo.adapters / "tower")
    assert outcomes(report) == {"parity_of_layers": "passed", "parity_of_tokens": "passed"}
    assert report.checks[0].figures["linears"] == 3 * 7 + of_tower, "text, blocks of the tower, mergers"
    assert report.checks[1].detail.endswith("; no prompt has an image")
    monkeypatch.setattr(parity, "changed_linears", lambda *_: nullcontext())
    report = report_on(comparison, zoo.adapters / "tower")
    assert outcomes(report) == {"parity_of_layers": "failed"}
    assert report.refusal is not None
    assert "model.visual." in report.refusal.message


def test_parity_of_an_adapter_for_vectors_compares_them(comparison: ParityComparison, zoo: Zoo, tmp_path: Path) -> None:
    uploaded, served = TaskAdapter(zoo.base, tmp_path / "up", 1).folder, tmp_path / "served"
    served.mkdir()
    rename_adapter(uploaded, served, comparison.setup.base, LIMITS)
    report = report_on(comparison, served)
    assert report.refusal is None, report.refusal
    assert report.checks[1].figures["largest_error"] < 0.1
    large = report_on(ParityComparison.over(setup_of(zoo, 0)), served)
    assert "FEATURE_EXTRACTION" in large.checks[1].detail

"""Tokens of the serving engine against PEFT's forward, of which one layer at a time is in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import peft
import pytest
import torch
from format_matrix import SERVED
from formats import FORMATS, LORA, FormatZoo
from other_kinds import make_kind
from peft_uploads import make_adapter
from safetensors.torch import load_file, save_file
from site_fixture import make_settings
from tiny_base import make_base
from upload_harness import upload_folder

from loramux.catalog.validation import parity_tokens
from loramux.catalog.validation.checkpoint_files import BaseFiles
from loramux.catalog.validation.conversion import convert
from loramux.catalog.validation.jobs import ConversionJob, EngineAnswer, ParityJob, ParitySetup, ValidationReport
from loramux.catalog.validation.parity import ParityComparison
from loramux.catalog.validation.validator import Unanswered
from loramux.common.settings.file import Settings
from loramux.common.settings.serving import AdapterLimits, EngineSettings, ModelSettings, ValidationSettings
from loramux.fleet.group import EngineGroup
from loramux.fleet.launching import launch_here
from loramux.server.platform import open_platform
from loramux.serving.engine_questions import EngineQuestions
from loramux_adapters.base import describe_base
from loramux_adapters.plan import WEIGHTS_NAME, PlanLimits


def setup_of(zoo: FormatZoo) -> ParitySetup:
    """A base that is too large to be copied, and not too large for its engine to be asked."""
    return ParitySetup(
        model_dir=str(zoo.base),
        base=describe_base(zoo.base),
        adapters=AdapterLimits(),
        memory_bytes=1 << 30,
        whole_model_bytes=0,
        engine_bytes=1 << 30,
    )


def answers_of(zoo: FormatZoo, folder: Path, prompts: tuple[list[int], ...], dtype: str) -> tuple[EngineAnswer, ...]:
    """Ask an engine that serves the base, as a server does."""
    settings = Settings(
        model=ModelSettings(path=str(zoo.base), served_model_name="tiny", dtype=dtype),
        engine=EngineSettings(num_threads=1, pool_bytes=8 << 20, in_process=True),
    )

    async def ask() -> tuple[EngineAnswer, ...] | Unanswered:
        [base] = settings.served_bases
        group = EngineGroup(base, settings.of_base(base), launch_here)
        await group.start()
        try:
            return await asyncio.to_thread(EngineQuestions(600.0).ask, group, folder, prompts)
        finally:
            await group.stop()

    answers = asyncio.run(ask())
    assert not isinstance(answers, Unanswered), answers
    return answers


def report_on(
    zoo: FormatZoo,
    uploaded: Path,
    served: Path | None = None,
    *,
    answered_with: Path | None = None,
    dtype: str = "float32",
    **changes: object,
) -> ValidationReport:
    """Compare in two jobs, as a validator does; the engine has `answered_with`, or what is served."""
    comparison = ParityComparison.over(msgspec.structs.replace(setup_of(zoo), serving=dtype, **changes))
    job = ParityJob(uploaded=str(uploaded), served=str(served or uploaded), limits=PlanLimits())
    first = comparison.report(job)
    assert ([check.name for check in first.checks], first.refusal) == (["parity_of_layers"], None)
    answers = answers_of(zoo, answered_with or served or uploaded, first.to_answer, dtype)
    return comparison.report(msgspec.structs.replace(job, answers=answers))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FormatZoo:
    """A base with a separate head, and one whose head is the embedding, which it scales."""
    return FormatZoo(request.param, tmp_path_factory.mktemp("base"), [], tied=request.param == "gemma3")


@pytest.mark.parametrize("name", ["plain", "dora", "ia3", "embedding", "saved_norms", "tokens"])
def test_layer_by_layer_every_format_passes(zoo: FormatZoo, name: str) -> None:
    folder = zoo.make_format(name, FORMATS[name], seed=1)
    [check] = report_on(zoo, folder).checks
    assert (check.name, check.outcome) == ("parity_of_tokens", "passed")
    assert "greedy tokens of the serving engine (float32)" in check.detail
    assert check.figures["tokens"] == 24
    assert check.figures["differing"] == 0
    assert check.figures["largest_logprob_error"] < 2e-4
    assert check.figures["mean_divergence_from_base"] > 1e-3


def test_layer_by_layer_adapter_of_a_base_of_text_and_images_passes(tmp_path: Path) -> None:
    zoo = FormatZoo("qwen3_5_images", tmp_path, [])
    targets = r".*language_model.*\.(q_proj|o_proj|down_proj|out_proj)"
    folder = zoo.make_format("text", peft.LoraConfig(**LORA | {"target_modules": targets}), seed=1)
    [check] = report_on(zoo, folder).checks
    assert (check.outcome, check.figures["differing"]) == ("passed", 0), check


def test_layer_by_layer_a_converted_kind_is_compared_with_the_original(zoo: FormatZoo, tmp_path: Path) -> None:
    uploaded, served = tmp_path / "uploaded", tmp_path / "served"
    served.mkdir()
    make_kind(zoo.base, uploaded, SERVED["hra"])
    job = ConversionJob(folder=str(uploaded), into=str(served), limits=PlanLimits())
    base = describe_base(zoo.base)
    assert convert(job, base, BaseFiles.of(str(zoo.base), base)).refusal is None
    [check] = report_on(zoo, uploaded, served).checks
    assert (check.outcome, check.figures["differing"]) == ("passed", 0)


def test_layer_by_layer_a_module_without_tensors_keeps_the_base_s_result(zoo: FormatZoo, tmp_path: Path) -> None:
    folder = zoo.make_format("partial", FORMATS["plain"], seed=3)
    tensors = {name: one for name, one in load_file(folder / WEIGHTS_NAME).items() if "layers.1." not in name}
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    assert report_on(zoo, folder).checks[0].outcome == "passed"


def test_layer_by_layer_rounding_of_the_engine_is_allowed_for(zoo: FormatZoo) -> None:
    [check] = report_on(zoo, zoo.make_format("plain", FORMATS["plain"], seed=1), dtype="bfloat16").checks
    assert check.outcome == "passed", check
    assert check.figures["largest_logprob_error"] > 2e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_by_layer_answers_of_another_adapter_are_found(zoo: FormatZoo, dtype: str) -> None:
    folder, other = (zoo.make_format(name, FORMATS["plain"], seed) for seed, name in enumerate(("one", "two")))
    report = report_on(zoo, folder, answered_with=other, dtype=dtype)
    assert [check.outcome for check in report.checks] == ["failed"]
    assert report.refusal is not None
    assert report.refusal.code == "parity_failed"


def test_layer_by_layer_adapter_with_added_tokens_is_not_run(zoo: FormatZoo, tmp_path: Path) -> None:
    model = zoo._base()
    model.resize_token_embeddings(105)
    peft.get_peft_model(model, peft.LoraConfig(**LORA | {"target_modules": ["q_proj"]})).save_pretrained(tmp_path)
    report = ParityComparison.over(setup_of(zoo)).report(
        ParityJob(uploaded=str(tmp_path), served=str(tmp_path), limits=PlanLimits())
    )
    assert report.to_answer == ()
    assert (report.checks[-1].outcome, "adds tokens" in report.checks[-1].detail) == ("not_run", True)


def test_layer_by_layer_layers_beyond_the_memory_are_not_run(zoo: FormatZoo) -> None:
    folder = zoo.make_format("plain", FORMATS["plain"], seed=1)
    answer = EngineAnswer(prompt=[5, 6], tokens=[1], logprobs=[-1.0])
    job = ParityJob(uploaded=str(folder), served=str(folder), limits=PlanLimits(), answers=(answer, answer))
    [check] = ParityComparison.over(msgspec.structs.replace(setup_of(zoo), memory_bytes=10_000)).report(job).checks
    assert (check.outcome, "parity_memory_bytes" in check.detail) == ("not_run", True)


def test_layer_by_layer_holds_one_layer_at_a_time(zoo: FormatZoo, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    load = parity_tokens.StreamedModel._load

    def counted(self: parity_tokens.StreamedModel, parameter: torch.nn.Parameter) -> torch.Tensor:
        held.append(len(self._held))
        return load(self, parameter)

    monkeypatch.setattr(parity_tokens.StreamedModel, "_load", counted)
    report_on(zoo, zoo.make_format("plain", FORMATS["plain"], seed=1))
    most = max(sum(1 for _ in layer.parameters()) for layer in zoo._base().model.layers)
    assert 1 < max(held) <= most


def test_layer_by_layer_is_part_of_an_uploads_validation_and_costs_nothing(tmp_path: Path) -> None:
    """With a server's own parts and processes: the engine answers, no tenant is billed, and no row is written."""
    base = make_base(tmp_path / "base")
    folder = make_adapter(base, tmp_path / "adapter")
    settings = make_settings(base, tmp_path)
    settings = msgspec.structs.replace(
        settings,
        model=msgspec.structs.replace(settings.model, dtype="float32"),
        validation=ValidationSettings(parity_model_bytes=0, parity_engine_seconds=600),
    )

    async def upload() -> ValidationReport:
        async with open_platform(settings) as platform:
            await platform.tenants.create("acme")
            acme = await platform.tenants.system_principal("acme")
            await upload_folder(platform.uploads, acme, "one", folder)
            [made] = await platform.uploads.before(acme, None, 10)
            assert await platform.usage.rows(acme.tenant) == []
            assert set(platform.completions.counters.requests.values()) <= {0}
            [engines] = [base.engines for base in platform.bases.values()]
            assert engines.unclaimed_tokens == 0
            return msgspec.json.decode(made.outcome.report, type=ValidationReport)

    report = asyncio.run(upload())
    check = report.checks[-1]
    assert (check.name, check.outcome) == ("parity_of_tokens", "passed"), check
    assert "serving engine" in check.detail
    assert report.to_answer == ()

"""The base that an adapter's configuration names, in the spellings of trainers and their caches."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
from tiny_peft import save_adapter, tiny_base

from loramux.catalog.validation.files import choose
from loramux.catalog.validation.jobs import ChoiceJob, FilesJob, FilesSetup, RetiredBase
from loramux_adapters.base import describe_base
from loramux_adapters.plan import CONFIG_NAME, PlanLimits

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAMES = MappingProxyType({"chat": "Qwen2.5-7B-Instruct", "base": "Qwen2.5-7B", "llama": "llama-3.2-1b"})


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter("llama", folder, target_modules=["q_proj"])
    return folder


def chosen(
    adapter: Path, folder: Path, claimed: str, names: dict[str, str] | None = None, retired: str | None = None
) -> str | None:
    """Return the base that is chosen among `names`, all of one shape, or the code of the refusal."""
    base = describe_base(tiny_base("llama", folder / "base"))
    config = json.loads((adapter / CONFIG_NAME).read_text()) | {"base_model_name_or_path": claimed}
    (adapter / CONFIG_NAME).write_text(json.dumps(config))
    bases = {
        name: FilesSetup(base=base, base_names=(name, own), serving="F32") for name, own in (names or NAMES).items()
    }
    files = FilesJob(folder=str(adapter), limits=PlanLimits(max_rank=64))
    gone = () if retired is None else (RetiredBase(names=(retired,), message="gone"),)
    report = choose(ChoiceJob(files=files, bases=bases, retired=gone))
    return report.base_model if report.refusal is None else report.refusal.code


@pytest.mark.parametrize(
    ("claimed", "expected"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "chat"),
        ("unsloth/qwen2.5-7b-instruct-unsloth-bnb-4bit", "chat"),
        ("unsloth/Qwen2.5-7B-bnb-4bit", "base"),
        ("unsloth/llama-3.2-1b-bnb-4bit", "llama"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "chat"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "chat"),
        ("RedHatAI/Qwen2.5-7B-Instruct-quantized.w4a16", "chat"),
        ("RedHatAI/Qwen2.5-7B-Instruct-FP8-dynamic", "chat"),
        ("hugging-quants/Qwen2.5-7B-Instruct-AWQ-INT4", "chat"),
        ("nvidia/Qwen2.5-7B-Instruct-NVFP4", "chat"),
        ("ModelCloud/Qwen2.5-7B-Instruct-gptqmodel-4bit", "chat"),
        ("mlx-community/Qwen2.5-7B-8bit", "base"),
        ("mobiuslabsgmbh/Qwen2.5-7B_4bit_hqq", "base"),
        ("Intel/Qwen2.5-7B-int4-AutoRound", "base"),
        ("unsloth/Llama-3.2-1B-BF16", "llama"),
        ("Qwen/Qwen2.5-7B-Instruct-block", "base_ambiguous"),
        (f"/root/.cache/huggingface/hub/models--Qwen--Qwen2.5-7B-Instruct/snapshots/{COMMIT}", "chat"),
        (f"/data/models--Qwen--Qwen2.5-7B/snapshots/{COMMIT}/", "base"),
        ("/root/.cache/modelscope/hub/models/Qwen/Qwen2___5-7B-Instruct", "chat"),
        (r"C:\models\Qwen2.5-7B-Instruct", "chat"),
        ("Qwen/Qwen2.5-14B-Instruct", "base_ambiguous"),
        ("unsloth/bnb-4bit", "base_ambiguous"),
    ],
)
def test_base_is_chosen_by_the_spellings_of_trainers(
    adapter: Path, tmp_path: Path, claimed: str, expected: str
) -> None:
    assert chosen(adapter, tmp_path, claimed) == expected


def test_base_name_of_a_quantized_copy_goes_before_the_copy_of_another(adapter: Path, tmp_path: Path) -> None:
    names = {"plain": "Qwen3-8B", "quantized": "Qwen3-8B-AWQ"}
    assert chosen(adapter, tmp_path, "Qwen/Qwen3-8B-AWQ", names) == "quantized"
    assert chosen(adapter, tmp_path, "Qwen/Qwen3-8B", names) == "plain"
    assert chosen(adapter, tmp_path, "unsloth/Qwen3-8B-bnb-4bit", names) == "base_ambiguous"
    del names["plain"]
    assert chosen(adapter, tmp_path, "Qwen/Qwen3-8B", names | {"other": "Qwen3-4B"}) == "quantized"


def test_base_name_of_a_retired_base_goes_before_its_copies(adapter: Path, tmp_path: Path) -> None:
    names = {"quantized": "Qwen3-8B-FP8", "other": "Qwen3-4B"}
    assert chosen(adapter, tmp_path, "Qwen/Qwen3-8B", names, retired="Qwen3-8B") == "base_model_retired"
    assert chosen(adapter, tmp_path, "Qwen/Qwen3-8B-FP8", names, retired="Qwen3-8B") == "quantized"

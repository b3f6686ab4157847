"""The table of model families is the only place that names one, and the page of families is made from it."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from loramux_adapters import families
from loramux_adapters.families import ENCODERS, FAMILIES, Family

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "adapters/loramux_adapters/families.py"
WORDS = {"dots1": "dots1", "gpt_oss": "gpt.?oss", "seed_oss": "seed.?oss", "phi3": "phi.?[0-9]"}
WORDS |= dict.fromkeys(("embedding_gemma2", "embedding_gemma2_text"), "embedding.?gemma")
"""Families whose name begins with a common word."""
STEMS = sorted({WORDS.get(name) or re.match(r"[a-z]+", name)[0] for name in (*FAMILIES, *ENCODERS)})
"""Names of families without their versions: llama, qwen ..."""
NAMED = re.compile(rf"(?<![a-z])({'|'.join(STEMS)})", re.IGNORECASE)
OTHER_SUBJECTS = (
    "platform/loramux/constraints/",  # ways of writing tool calls, by vLLM's names of them
    "platform/loramux/common/settings/serving.py",
    "platform/loramux/common/bundle.py",  # the names of sentence-transformers' files
    "platform/loramux/serving/calls.py",
    "api/loramux_api/unknown_fields.py",  # values of other servers' fields
    "platform/loramux/simulator/hardware.py",  # the planner's sizes of published models
)


def mentions(path: Path) -> list[str]:
    """Names of families in a module's code: identifiers and strings, but neither docstrings nor comments."""
    found = []
    tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))
    before = tokenize.NEWLINE
    for token in tokens:
        is_docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL)
        if token.type in (tokenize.NAME, tokenize.STRING) and not is_docstring and NAMED.search(token.string):
            found.append(f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}")
        before = token.type if token.type != tokenize.COMMENT else before
    return found


def test_no_other_module_of_the_product_names_a_family() -> None:
    paths = [p for root in ("kernels", "adapters", "platform", "api") for p in sorted((ROOT / root).rglob("*.py"))]
    assert len(paths) > 200
    others = [p for p in paths if p != TABLE and not str(p.relative_to(ROOT)).startswith(OTHER_SUBJECTS)]
    assert [place for path in others for place in mentions(path)] == []
    assert len(mentions(TABLE)) > len(FAMILIES)


@pytest.mark.parametrize("folder", ["kernels", "platform/loramux/engine"])
def test_comments_and_docstrings_of_the_engine_name_no_family_either(folder: str) -> None:
    paths = [p for kind in ("*.py", "*.hpp", "*.cpp") for p in (ROOT / folder).rglob(kind) if p != TABLE]
    found = [
        f"{p.relative_to(ROOT)}: {line}" for p in paths for line in p.read_text().splitlines() if NAMED.search(line)
    ]
    assert found == []


def test_text_of_images_has_the_row_of_its_text_or_else_its_own() -> None:
    assert families.family_of_text("gemma3_text") is FAMILIES["gemma3_text"]
    assert families.family_of_text("qwen2_vl_text") is FAMILIES["qwen2_vl"]
    assert families.family_of_text("unknown") == Family("unknown")

"""The benchmark of pipelines counts what an engine computes, in all three ways."""

from __future__ import annotations

from pathlib import Path

import models
import pipelines
import pytest
import specs
from pipelines import ADDED, ANSWER, EVALUATION, EVALUATORS, INVOCATION, WAYS
from specs import MODELS


def test_context_is_computed_once_by_activated_adapters_and_once_each_by_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "WORK", tmp_path)
    spec, context, count = MODELS["micro"], 600, len(EVALUATORS)
    models.ensure(spec)
    measured = pipelines.measure(spec, context=context, turns=2, conversations=1, threads=1)
    reuse, without, plain = [stages for _, stages in measured]
    first, invocation = context + ANSWER, len(INVOCATION)
    second = first + count * EVALUATION + ADDED
    whole = {
        "base, turn 1": context,
        "evaluations, turn 1": count * (first + invocation),
        "base, turn 2": second,
        "evaluations, turn 2": count * (second + ANSWER + invocation),
    }
    assert {name: stage.computed_tokens for name, stage in without.items()} == whole
    for stages in (reuse, plain):
        assert {name: stage.prompt_tokens for name, stage in stages.items()} == whole
        assert stages["base, turn 1"].computed_tokens == context
        assert stages["base, turn 2"].computed_tokens < second - first + 256, "its own KV of the first turn is found"
    assert reuse["evaluations, turn 1"].computed_tokens < count * 256, "less than a page and the invocation each"
    assert plain["evaluations, turn 1"].computed_tokens == count * (first + invocation)
    assert len(WAYS) == 3
    assert all(len(stage.first_token_s) in (1, count) for stage in reuse.values())

"""A regular expression cannot block the server; a harmless one matches as it does in this process."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loramux_adapters.errors import ConfigRejected
from loramux_adapters.matching import Match, TargetRules, match_modules
from loramux_adapters.targets import is_demanding, match_guarded

NAMES = [f"model.layers.{layer}.{leaf}" for layer in range(3) for leaf in ("self_attn.q_proj", "mlp.up_proj", "norm")]
NAMES.append("lm_head")
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|k_proj|up_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj)))"
)


def targets(target_modules: str) -> TargetRules:
    return TargetRules(target_modules, None, None, None, [], [])


@pytest.mark.parametrize(
    "expression", [r".*\.(q|k)_proj", r"model\.layers\.[12]\..*", UNSLOTH, "lm_head", r"(?!.*norm).*"]
)
def test_regex_child_finds_what_this_process_finds(expression: str) -> None:
    found = match_guarded(targets(expression), NAMES)
    assert found == match_modules(targets(expression), NAMES)
    assert found


def test_regex_patterns_cross_to_the_child_and_back() -> None:
    rules = TargetRules(
        ["q_proj"], ["model.layers.0.self_attn.q_proj"], [0, 1], ["(layers)"], ["^.*q_proj"], ["q_proj"]
    )
    assert match_guarded(rules, NAMES) == [Match("model.layers.1.self_attn.q_proj", "^.*q_proj", "q_proj")]


@pytest.mark.parametrize(
    "rules",
    [
        targets("(.+)+x"),
        targets("(m|m|m)(o|o|o)" + "(.|.|.)" * 20 + "x"),
        targets("(?i)" + r"[\u0000-\uffff]" * 4000),
        TargetRules(["q_proj"], r"((\w+\.?)+)+!", None, None, [], []),
        TargetRules(["q_proj"], None, [1], ["(.*.*.*)*x"], [], []),
        targets("model.layers.0.self_attn.q_proj")._replace(rank_keys=["(.+)+x"]),
        targets("model.layers.0.self_attn.q_proj")._replace(alpha_keys=["(.+)+x"]),
    ],
    ids=["repeats", "alternatives", "compiling", "exclude", "layers", "rank", "alpha"],
)
def test_regex_endless_expression_is_refused(rules: TargetRules) -> None:
    with pytest.raises(ConfigRejected) as caught:
        match_guarded(rules, NAMES * 20)
    assert caught.value.code == "pattern_too_slow"
    assert caught.value.field in {
        "target_modules",
        "exclude_modules",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
    }


@pytest.mark.parametrize("key", ["a)", "(", "[", "a\\", "*"])
def test_regex_invalid_expression_is_refused_by_field(key: str) -> None:
    with pytest.raises(ConfigRejected) as caught:
        match_guarded(targets("lm_head")._replace(rank_keys=[key]), NAMES)
    assert (caught.value.code, caught.value.field) == ("pattern_invalid", "rank_pattern")


def test_regex_of_peft_needs_no_child() -> None:
    assert not any(map(is_demanding, [*NAMES, "q_proj", "^model.layers.1.mlp", r"model\.layers\.1\.mlp", r"a\*\("]))


@settings(max_examples=500, deadline=None)
@given(expression=st.text(r"a.^$\\wdbBZA1-_" + "*+?{|([", max_size=12))
def test_regex_plain_expression_has_no_operator(expression: str) -> None:
    escaped = False
    operators = 0
    for character in expression:
        operators += not escaped and character in "*+?{|(["
        escaped = character == "\\" and not escaped
    assert is_demanding(expression) == (operators > 0)

"""Our matching rules against PEFT's own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.other import get_pattern_key

from loramux_adapters.matching import InvalidExpression, Match, TargetRules, expressions, match_modules

SEGMENTS = ["model", "layers", "h", "layer", "0", "1", "10", "self_attn", "mlp", "experts", "q_proj", "up_proj", "a"]
names = st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=6).map(".".join)
regexes = st.sampled_from(
    [
        r".*\.(q|up)_proj",
        r".*q_proj",
        "q_proj",
        r"model\.layers\.\d+\..*",
        r"(?!.*experts).*_proj",
        "layers.1",
        "^layers",
        r"^model.layers.(0|1)\..*",
        "a|mlp",
        ".*",
        r"(.)\1*",
    ]
)
layer_names = st.sampled_from(["layers", "h", "lay.*", "layers|h", "experts", "self_attn"])
rules = st.builds(
    TargetRules,
    target_modules=regexes | st.lists(names, min_size=1, max_size=4),
    exclude_modules=st.none() | regexes | st.lists(names, max_size=2),
    layers_to_transform=st.none() | st.lists(st.sampled_from([0, 1, 10]), max_size=2),
    layers_pattern=st.none() | st.lists(layer_names, max_size=2),
    rank_keys=st.lists(names | regexes, max_size=3, unique=True),
    alpha_keys=st.lists(names | regexes, max_size=3, unique=True),
)


def peft_matches(rules: TargetRules, modules: list[str]) -> list[Match]:
    config = SimpleNamespace(**rules._asdict(), target_parameters=None)
    found = [(name, check_target_module_exists(config, name)) for name in modules]
    return [
        Match(name, get_pattern_key(rules.rank_keys, name), get_pattern_key(rules.alpha_keys, name))
        for name, result in found
        if result and not isinstance(result, _ExcludedModule)
    ]


def only_targets(rules: TargetRules) -> TargetRules:
    """Fields that PEFT allows together with a regular expression for targets."""
    if isinstance(rules.target_modules, str):
        return rules._replace(layers_to_transform=None, layers_pattern=None)
    return rules


@settings(max_examples=1500, deadline=None)
@given(rules=rules.map(only_targets), modules=st.lists(names, max_size=8, unique=True))
@example(TargetRules(["layers.0.q_proj"], None, [1], None, [], []), ["layers.0.q_proj", "model.layers.0.q_proj"])
@example(TargetRules(["q_proj"], None, [1], None, [], []), ["model.layers.1.experts.0.q_proj", "layers.1.q_proj"])
@example(TargetRules(["q_proj"], None, [0], ["layers|h"], [], []), ["model.layers.0.q_proj", "h.0.q_proj"])
@example(TargetRules(["q_proj"], None, None, None, ["^model.layers.1.q_proj", "q_proj"], []), ["model.layers.1.q_proj"])
def test_matching_modules_ranks_and_alphas_equal_pefts(rules: TargetRules, modules: list[str]) -> None:
    assert match_modules(rules, modules) == peft_matches(rules, modules)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"target_modules": "("}, "target_modules"),
        ({"exclude_modules": "[a"}, "exclude_modules"),
        ({"layers_to_transform": [1], "layers_pattern": ["(?P<idx>a)"]}, "layers_pattern"),
        ({"rank_keys": ["q_proj", "a)"]}, "rank_pattern"),
        ({"alpha_keys": ["*"]}, "alpha_pattern"),
        ({"target_modules": "(" * 5000 + ")" * 5000}, "target_modules"),
        ({"target_modules": "a{99999999999}"}, "target_modules"),
    ],
)
def test_matching_invalid_expression_is_named(fields: dict[str, Any], field: str) -> None:
    plain = TargetRules(["q_proj"], None, None, None, [], [])
    with pytest.raises(InvalidExpression) as caught:
        match_modules(plain._replace(**fields), ["q_proj"])
    assert caught.value.field == field


def test_matching_every_expression_is_listed() -> None:
    rules = TargetRules("t", "e", [1], ["l"], ["r"], ["a"])
    assert [written for _, written in expressions(rules)] == ["t", "e", "l", "r", "a"]
    assert [written for _, written in expressions(TargetRules(["t"], ["e"], None, None, [], []))] == []

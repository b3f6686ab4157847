"""Kernels that begin early read, before they wait, only what no kernel of a step writes: read from their source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TABLES = ("work", "shrink_work", "slot_mapping", "row_slots", "sites", "blocks", "ranks", "scales", "b_offsets")
FROM_THE_HOST = frozenset(("weight", "pool", *TABLES))
"""Parameters that are weights, adapters, and tables that the host has copied before the step's first kernel."""


@pytest.fixture(scope="module")
def kernels() -> dict[str, tuple[ast.FunctionDef, set[str]]]:
    """The source of every kernel that may begin early, and its parameters that are tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
        from kernel_variants import all_variants  # type: ignore[import-not-found]
    found: dict[str, tuple[ast.FunctionDef, set[str]]] = {}
    for launch in (variant.launch for variant in all_variants()):
        function: Any = launch.kernel.fn
        if "DEPENDENT" in inspect.signature(function).parameters:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
            assert isinstance(tree, ast.FunctionDef)
            tensors = {name for name, value in launch.arguments.items() if isinstance(value, torch.Tensor)}
            found.setdefault(tree.name, (tree, set()))[1].update(tensors)
    return found


def called(node: ast.AST) -> str:
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return all statements in the order of the source, each loop and condition before its body."""
    found = []
    for statement in body:
        found.append(statement)
        for part in ("body", "orelse"):
            found += statements(getattr(statement, part, []))
    return found


def own_expressions(statement: ast.stmt) -> list[ast.expr]:
    return [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr)]


def read_before_the_wait(kernel: ast.FunctionDef) -> set[str]:
    """Return the parameters that reach an address or another function before the first `wait_for_earlier`."""
    sources = {argument.arg: {argument.arg} for argument in kernel.args.args}
    read: set[str] = set()

    def reaching(node: ast.AST) -> set[str]:
        names = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
        return set().union(*(sources.get(name, set()) for name in names))

    for statement in statements(kernel.body):
        for expression in own_expressions(statement):
            for node in ast.walk(expression):
                if called(node) == "wait_for_earlier":
                    return read
                assert not called(node).startswith(("tl.store", "tl.atomic")), f"{kernel.name} writes before it waits"
                if called(node) == "tl.load" or (called(node) and not called(node).startswith("tl.")):
                    read |= reaching(node)
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.For):
            value = statement.iter if isinstance(statement, ast.For) else statement.value
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for name in (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                sources[name] = sources.get(name, set()) | reaching(value)
    raise AssertionError(f"{kernel.name} does not wait")


def test_kernels_that_begin_early_are_those_of_a_decode_step(kernels) -> None:
    assert kernels.keys() == {
        *("_rms_norm", "_gated", "_rope_write_kv", "_attend", "_expand_rows", "_expand_tiles"),
        *("_expand_rms_norm", "_expand_gated", "_expand_rope_write_kv"),
    }


def test_kernels_that_begin_early_read_nothing_of_a_step_before_they_wait(kernels) -> None:
    early = {name: read_before_the_wait(tree) & tensors for name, (tree, tensors) in kernels.items()}
    assert {name: read - FROM_THE_HOST for name, read in early.items() if read - FROM_THE_HOST} == {}
    assert early["_rms_norm"] == {"weight"}
    assert early["_gated"] == set()


def test_kernels_that_begin_early_wait_in_every_program(kernels) -> None:
    """A program without work must wait too: the end of a launch implies the end of all launches before it."""
    for name, (tree, _) in kernels.items():
        assert called(own_expressions(tree.body[0] if not ast.get_docstring(tree) else tree.body[1])[0]) == (
            "begin_dependent"
        ), name
        waits = [s for s in tree.body if isinstance(s, ast.Expr) and called(s.value) == "wait_for_earlier"]
        assert waits, f"{name} waits under a condition alone"
        before = tree.body[: tree.body.index(waits[0])]
        assert not any(isinstance(node, ast.Return) for s in before for node in ast.walk(s)), name

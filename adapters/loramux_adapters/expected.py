"""A file's tensors held against those that its configuration implies on a base: all, no others, in right shapes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from loramux_adapters.errors import BaseMismatch, shown
from loramux_adapters.header import SafetensorsHeader

Shapes = Mapping[str, tuple[int, ...]]


def check_tensors(
    expected: Shapes, header: SafetensorsHeader, context: str, optional: Shapes = MappingProxyType({})
) -> None:
    """Raise BaseMismatch (`tensors_missing`, `tensors_unexpected`, `shape_mismatch`) unless the file holds `expected`.

    It may hold any of `optional` too. `context` ends each message: what the base is, and what the adapter says it was
    trained on.
    """
    if missing := [key for key in expected if key not in header.tensors]:
        raise BaseMismatch(
            "tensors_missing",
            missing[0],
            f"{len(missing)} of the {len(expected)} tensors that adapter_config.json implies on this base are not in "
            f"the file: {shown(missing)}. {context}",
        )
    if unexpected := [key for key in header.tensors if key not in expected and key not in optional]:
        raise BaseMismatch(
            "tensors_unexpected",
            unexpected[0],
            f"{len(unexpected)} tensors of the file are not among the {len(expected)} that adapter_config.json implies "
            f"on this base: {shown(unexpected)}. {context}",
        )
    found = {**expected, **{key: shape for key, shape in optional.items() if key in header.tensors}}
    wrong = [key for key, shape in found.items() if header.tensors[key].shape != tuple(shape)]
    if wrong:
        listed = "; ".join(
            f"{key} is {list(header.tensors[key].shape)}, expected {list(found[key])}" for key in wrong[:3]
        )
        raise BaseMismatch(
            "shape_mismatch",
            wrong[0],
            f"{len(wrong)} of {len(found)} tensors have another shape than rank and base imply: {listed}. {context}",
        )

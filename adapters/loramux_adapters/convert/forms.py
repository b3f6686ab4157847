"""The kinds of adapter that are converted, by PEFT's `peft_type`."""

from __future__ import annotations

from collections.abc import Mapping

from loramux_adapters.convert.blocks import C3a, GraLora, Miss
from loramux_adapters.convert.form import Form
from loramux_adapters.convert.lycoris import LoHa, LoKr
from loramux_adapters.convert.scaled import AdaLora, DeLora
from loramux_adapters.convert.shared import Pvera, RandLora, VbLora, Vera

FORMS: Mapping[str, type[Form]] = {
    "ADALORA": AdaLora,
    "C3A": C3a,
    "DELORA": DeLora,
    "GRALORA": GraLora,
    "LOHA": LoHa,
    "LOKR": LoKr,
    "MISS": Miss,
    "PVERA": Pvera,
    "RANDLORA": RandLora,
    "VBLORA": VbLora,
    "VERA": Vera,
}

_EVERYWHERE = frozenset(
    ("auto_mapping", "bias", "inference_mode", "peft_type", "peft_version", "revision", "task_type")
)


def known_fields(form: type[Form]) -> frozenset[str]:
    """The fields that may stand in the kind's adapter_config.json switched on."""
    return frozenset(form.__struct_fields__) | form.HARMLESS | _EVERYWHERE

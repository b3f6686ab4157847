"""Adapters of other kinds become, at upload, the LoRA that computes exactly the same."""

from loramux_adapters.convert.conversion import Conversion, convert_adapter
from loramux_adapters.convert.forms import FORMS

__all__ = ["FORMS", "Conversion", "convert_adapter"]

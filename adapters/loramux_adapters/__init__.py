"""PEFT files on disk become a validated adapter, and its weights become resident in pages of the pool.

What is exported here checks files and imports no torch; weights.py, bank.py and linear.py hold tensors.
"""

from loramux_adapters.base import BaseDescription, LinearShape, VocabularyShape, describe_base, describe_model
from loramux_adapters.config import AdapterConfig, Ia3Config, LoraConfig, parse_adapter_config
from loramux_adapters.errors import AdapterRejected, BaseMismatch, BaseUnusable, ConfigRejected, WeightsFileRejected
from loramux_adapters.finite import check_finite
from loramux_adapters.header import SafetensorsHeader, TensorInfo, read_header
from loramux_adapters.parts import AdapterPlan, LoraPair, RowsPart, VectorKind, VectorPart
from loramux_adapters.plan import Limits, plan_adapter
from loramux_adapters.validate import CONFIG_NAME, WEIGHTS_NAME, inspect_adapter, validate_adapter

__all__ = [
    "CONFIG_NAME",
    "WEIGHTS_NAME",
    "AdapterConfig",
    "AdapterPlan",
    "AdapterRejected",
    "BaseDescription",
    "BaseMismatch",
    "BaseUnusable",
    "ConfigRejected",
    "Ia3Config",
    "Limits",
    "LinearShape",
    "LoraConfig",
    "LoraPair",
    "RowsPart",
    "SafetensorsHeader",
    "TensorInfo",
    "VectorKind",
    "VectorPart",
    "VocabularyShape",
    "WeightsFileRejected",
    "check_finite",
    "describe_base",
    "describe_model",
    "inspect_adapter",
    "parse_adapter_config",
    "plan_adapter",
    "read_header",
    "validate_adapter",
]

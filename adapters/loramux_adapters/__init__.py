"""PEFT files become a validated adapter, and its weights become resident in pages of the pool.

The way of an adapter, one module a step:

1. Read. `config` parses adapter_config.json strictly (`strict_json`; `unsupported` lists the refusals with the way
   out), `weights_file` the safetensors header, both bounded before anything is built.
2. Plan. `base` describes the served model from its config.json. `targets` finds the modules that the configuration
   means, by PEFT's rules (`matching`; in bounded time: `regex_guard`); `plan` and `vocabulary` derive the exact
   `components` (pairs, vectors, rows of tokens) and compare them with the file. `validate` runs steps 1 and 2 and
   reads every value once. `convert` turns adapters of other kinds into a LoRA first.
3. Load. `weights` reads the tensors in the serving dtype; `base_weights` fits them to the base (DoRA's lengths).
4. Place. `layout` cuts the matrices into blocks and packs them into pages; `bank` copies them into the pool and writes
   the tables from which the kernels find them; `extras` describes what does not fit these tables.
5. Serve. `install` replaces the model's linears, embedding, head (`modules`) and mixtures (`experts`) by modules that
   add the adapters of the running step.

Importing the package imports no torch: files are checked without it. `weights`, `bank`, `modules` and what is built on
them hold tensors. The package imports nothing of loramux; see `errors`.
"""

from loramux_adapters.base import BaseDescription, LinearShape, VocabularyShape, describe_base, describe_model
from loramux_adapters.components import AdapterPlan, LinearVector, LoraPair, TokenRows, VectorKind
from loramux_adapters.config import AdapterConfig, Ia3Config, LoraConfig, parse_adapter_config
from loramux_adapters.errors import AdapterRejected, BaseMismatch, BaseUnusable, ConfigRejected, WeightsFileRejected
from loramux_adapters.plan import CONFIG_NAME, WEIGHTS_NAME, Limits, inspect_adapter, plan_adapter, validate_adapter
from loramux_adapters.weights_file import SafetensorsHeader, TensorInfo, check_finite, read_header

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
    "LinearVector",
    "LoraConfig",
    "LoraPair",
    "SafetensorsHeader",
    "TensorInfo",
    "TokenRows",
    "VectorKind",
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

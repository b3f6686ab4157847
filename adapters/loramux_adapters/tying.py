"""Weight tying: the effect of `ensure_weight_tying` on a configuration if the base's head is its embedding.

PEFT then trains one matrix, or one pair, in both places: PEFT adds the embedding to the field that names either of the
two, and makes the head's part from the embedding's part. Source: `_check_tied_modules` (peft/tuners/tuners_utils.py),
`_add_modules_to_save_to_tie` and `_add_targets_to_tie` (peft/tuners/lora/model.py) of PEFT 0.21.2. Trained rows of
single tokens are tied without this field: `targets.token_rows`.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence

import msgspec

from loramux_adapters.base import BaseDescription, VocabularyShape
from loramux_adapters.components import PREFIX, Repeat, TokenRows
from loramux_adapters.config import LoraConfig
from loramux_adapters.errors import ConfigRejected
from loramux_adapters.matching import TargetRules
from loramux_adapters.targets import match_guarded
from loramux_adapters.weights_file import SafetensorsHeader

_NAMES = ("embed_tokens", "lm_head")
"""PEFT's EMBEDDING_LAYER_NAMES: only by these names PEFT decides if a field means the embedding or the head."""


class Tying(enum.Enum):
    """The part of an adapter that is used for both the embedding and the head."""

    SAVED = "the matrix of modules_to_save"
    PAIR = "the pair of target_modules"


def tie_config(config: LoraConfig, base: BaseDescription) -> tuple[LoraConfig, Tying | None]:
    """Return the configuration with PEFT's tying, and the tied part; None: no part is tied.

    The returned configuration names the embedding and not the head. Raises ConfigRejected (`pattern_invalid`,
    `pattern_too_slow`).
    """
    vocabulary = base.vocabulary
    if not config.ensure_weight_tying or vocabulary is None or not vocabulary.tied or vocabulary.head not in base.names:
        return config, None
    if any(_is_vocabulary(name) for name in config.modules_to_save or ()):
        saved = _with_embedding(config.modules_to_save or (), vocabulary)
        return msgspec.structs.replace(config, modules_to_save=saved), Tying.SAVED
    targets = config.target_modules
    if isinstance(targets, str):
        if not match_guarded(TargetRules(targets, None, None, None, (), ()), _NAMES):
            return config, None
        # PEFT skips the head, even if the expression matches it.
        targets = rf"(?!{re.escape(vocabulary.head)}$)(?:{targets}|{re.escape(vocabulary.embedding)})"
        return msgspec.structs.replace(config, target_modules=targets), Tying.PAIR
    if not any(_is_vocabulary(name) for name in targets):
        return config, None
    return msgspec.structs.replace(config, target_modules=_with_embedding(targets, vocabulary)), Tying.PAIR


def tie_rows(
    rows: Sequence[TokenRows], base: BaseDescription, header: SafetensorsHeader
) -> tuple[tuple[TokenRows, ...], tuple[Repeat, ...]]:
    """Return `rows` and the head's rows, which equal the embedding's rows, with their names in the file."""
    vocabulary = base.vocabulary
    assert vocabulary is not None, "tied"
    if any(part.module == vocabulary.head for part in rows):  # PEFT leaves a copy that has another name untied
        return tuple(rows), ()
    names = [f"{PREFIX}{module}.weight" for module in (vocabulary.embedding, vocabulary.head)]
    key = next((name for name in names if name in header.tensors), names[0])
    shape = vocabulary.num_tokens, vocabulary.hidden_size
    tied = tuple(TokenRows(module, key, *shape, None) for module in (vocabulary.embedding, vocabulary.head))
    others = tuple(part for part in rows if part.module != vocabulary.embedding)
    return (*others, *tied), tuple(Repeat(name, key) for name in names if name != key)


def check_tied_target(targeted: Iterable[str], base: BaseDescription) -> None:
    """Raise ConfigRejected (`config_invalid`) unless the embedding, from whose pair the head's is made, is a target."""
    assert base.vocabulary is not None, "tied"
    if base.vocabulary.embedding not in targeted:
        raise ConfigRejected(
            "config_invalid",
            "ensure_weight_tying",
            f"ensure_weight_tying makes the head's pair from that of {base.vocabulary.embedding}, which "
            "exclude_modules leaves out; PEFT cannot load it either. Take one of the two fields out.",
        )


def _is_vocabulary(name: str) -> bool:
    return name.rpartition(".")[2] in _NAMES


def _with_embedding(names: Sequence[str], vocabulary: VocabularyShape) -> tuple[str, ...]:
    kept = (name for name in names if not f".{vocabulary.head}.".endswith(f".{name}."))
    return tuple(dict.fromkeys((*kept, vocabulary.embedding)))

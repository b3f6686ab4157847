"""What an adapter changes of the embedding and the output head: pairs, whole matrices, the rows of single tokens.

Source: `_set_trainable` and `set_additional_trainable_modules` (peft/utils/other.py) of PEFT 0.21.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from loramux_adapters.base import BaseDescription, VocabularyShape
from loramux_adapters.errors import ConfigRejected, shown
from loramux_adapters.parts import PREFIX, BaseCopy, RowsPart

_WAY_OUT = "Train it without, or merge it into a base of your own."


def saved_modules(names: Sequence[str] | None, base: BaseDescription) -> Iterator[RowsPart]:
    """The whole matrices of `modules_to_save`; raises ConfigRejected (`target_unsupported`) for any other module."""
    for module in (m for m in base.names if any(m.endswith(name) for name in names or ())):
        vocabulary = base.vocabulary
        if vocabulary is None or module not in (vocabulary.embedding, vocabulary.head):
            kind = base.others.get(module, "linear layer")
            raise ConfigRejected(
                "target_unsupported",
                "modules_to_save",
                f"modules_to_save means {module!r}, a {kind}. Whole copies of the embedding and of the output head are "
                f"served, and of no other module. {_WAY_OUT}",
            )
        yield RowsPart(module, f"{PREFIX}{module}.weight", vocabulary.num_tokens, vocabulary.hidden_size, None)


def token_rows(
    indices: Sequence[int] | Mapping[str, Sequence[int]] | None, base: BaseDescription
) -> Iterator[RowsPart]:
    """The rows of `trainable_token_indices`, which where the base is tied stand in the head too.

    Raises ConfigRejected: `target_unsupported`, `config_invalid`.
    """
    if not indices:
        return
    vocabulary = base.vocabulary
    if vocabulary is None:
        raise _rejected("target_unsupported", f"This base's embedding and head take none. {_WAY_OUT}")
    listed = indices if isinstance(indices, Mapping) else {vocabulary.embedding: indices}
    served = (vocabulary.embedding,) if vocabulary.tied else (vocabulary.embedding, vocabulary.head)
    for name, ids in listed.items():
        modules = [module for module in base.names if module.endswith(name)]
        if len(modules) != 1 or modules[0] not in served:
            raise _rejected(
                "target_unsupported",
                f"It names {name[:120]!r}, which means {shown(modules) or 'nothing'}; on this base it may mean "
                f"{' or '.join(served)}" + (", whose rows are the head's too." if vocabulary.tied else "."),
            )
        _check_ids(ids, vocabulary)
        yield from _rows_of(modules[0], ids, vocabulary)


def _rows_of(module: str, ids: Sequence[int], vocabulary: VocabularyShape) -> Iterator[RowsPart]:
    key = f"{PREFIX}{module}.token_adapter.trainable_tokens_delta"
    for place in (vocabulary.embedding, vocabulary.head) if vocabulary.tied else (module,):
        yield RowsPart(place, key, len(ids), vocabulary.hidden_size, tuple(ids))


def _check_ids(ids: Sequence[int], vocabulary: VocabularyShape) -> None:
    if not ids:
        raise _rejected("config_invalid", "It has a list without a token.")
    if len(set(ids)) < len(ids):
        raise _rejected("config_invalid", "It names a token twice.")
    if max(ids) >= vocabulary.num_tokens:
        raise _rejected(
            "config_invalid",
            f"It names token {max(ids)}; this base has {vocabulary.num_tokens}. Was the vocabulary extended?",
        )


def base_copies(targeted: Collection[str], base: BaseDescription) -> tuple[BaseCopy, ...]:
    """What PEFT may save beside an adapter that targets the embedding or the head."""
    if (vocabulary := base.vocabulary) is None:
        return ()
    return tuple(
        BaseCopy(module, vocabulary.num_tokens, vocabulary.hidden_size)
        for module in (vocabulary.embedding, vocabulary.head)
        if module in targeted
    )


def check_once(targeted: Iterable[str], rows: Sequence[RowsPart]) -> None:
    """Raise ConfigRejected (`config_invalid`) where two fields mean one module: which comes first is not defined."""
    taken = set(targeted)
    for part in rows:
        if part.module in taken:
            field = "modules_to_save" if part.token_ids is None else "trainable_token_indices"
            raise ConfigRejected(
                "config_invalid",
                field,
                f"{field} means {part.module!r}, which another of target_modules, modules_to_save and "
                "trainable_token_indices means too. Name it in one of them.",
            )
        taken.add(part.module)


def check_tying(ensure_weight_tying: bool, touched: Iterable[str], base: BaseDescription) -> None:
    """Raise ConfigRejected where ensure_weight_tying would make an adapter of the embedding one of the head as well."""
    vocabulary = base.vocabulary
    if not ensure_weight_tying or vocabulary is None or not vocabulary.tied:
        return
    if not {vocabulary.embedding, vocabulary.head}.isdisjoint(touched):
        raise ConfigRejected(
            "field_unsupported",
            "ensure_weight_tying",
            "ensure_weight_tying is set, and this base's head is its embedding: one trained matrix would serve in both "
            "places, which is done for trainable_token_indices alone. Train without ensure_weight_tying.",
        )


def _rejected(code: str, reason: str) -> ConfigRejected:
    return ConfigRejected(
        code, "trainable_token_indices", f"trainable_token_indices cannot be served as it is. {reason}"
    )

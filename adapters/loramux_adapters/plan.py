"""Which tensors a configuration implies on a base, by name and shape, held against those that the file has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loramux_adapters.base import BaseDescription, VocabularyShape
from loramux_adapters.config import AdapterConfig, Ia3Config, LoraConfig
from loramux_adapters.errors import ConfigRejected, WeightsFileRejected
from loramux_adapters.expected import check_tensors
from loramux_adapters.header import SafetensorsHeader
from loramux_adapters.ia3 import ia3_vectors
from loramux_adapters.matching import Match
from loramux_adapters.parameters import match_parameters, part_pairs
from loramux_adapters.parts import EMBEDDING_PAIR, AdapterPlan, LoraPair, VectorKind, VectorPart
from loramux_adapters.targets import context, match_targets, unsupported_target
from loramux_adapters.vocabulary import base_copies, check_once, check_tying, saved_modules, token_rows


@dataclass(frozen=True, slots=True)
class Limits:
    """What an operator allows."""

    max_rank: int = 256
    max_bytes: int = 2 << 30
    """Of the weights file."""
    max_vocabulary_bytes: int = 1 << 30
    """Of what an adapter brings for the embedding and the head, as the file has it."""
    max_modules: int = 1 << 20
    """That one adapter changes."""


def plan_adapter(
    config: AdapterConfig, header: SafetensorsHeader, base: BaseDescription, limits: Limits
) -> AdapterPlan:
    """The plan of an adapter whose tensors are exactly those that `config` implies on `base`.

    Raises ConfigRejected (`pattern_invalid`, `pattern_too_slow`, `target_unsupported`, `field_unsupported`,
    `config_invalid`, `rank_too_large`, `scale_invalid`, `too_many_targets`), WeightsFileRejected (`weights_too_large`,
    `vocabulary_too_large`) or BaseMismatch (`no_module_matched`, `tensors_missing`, `tensors_unexpected`,
    `shape_mismatch`).
    """
    _check_size(header, limits)
    if isinstance(config, Ia3Config):
        plan = _plan_ia3(config, header, base)
    else:
        plan = _plan_lora(config, header, base, limits)
    trained_on = context(base, config.base_model_name_or_path)
    check_tensors(plan.shapes, header, trained_on, plan.optional_shapes)
    _check_vocabulary(plan, header, base, limits)
    _check_modules(plan, limits)
    return plan


def _plan_lora(config: LoraConfig, header: SafetensorsHeader, base: BaseDescription, limits: Limits) -> AdapterPlan:
    _check_invocation(config, base)
    matches = _matches(config, base)
    _check_targets(matches, config, base)
    pairs = tuple(_pair(match, config, base, limits) for match in matches)
    rows = (*saved_modules(config.modules_to_save, base), *token_rows(config.trainable_token_indices, base))
    targeted = [pair.module for pair in pairs]
    check_once(targeted, rows)
    check_tying(config.ensure_weight_tying, (*targeted, *(p.module for p in rows if p.token_ids is None)), base)
    vectors = tuple(_vectors(pairs, config))
    pairs += tuple(_parameter_pairs(config, base, limits))
    copies = base_copies(targeted, base)
    return AdapterPlan(pairs, header.file_bytes, config.alora_invocation_tokens, vectors, rows, copies)


def _plan_ia3(config: Ia3Config, header: SafetensorsHeader, base: BaseDescription) -> AdapterPlan:
    vectors, rows = ia3_vectors(config, base), tuple(saved_modules(config.modules_to_save, base))
    targeted = [vector.module for vector in vectors]
    check_once(targeted, rows)
    return AdapterPlan((), header.file_bytes, None, vectors, rows, base_copies(targeted, base))


def _check_modules(plan: AdapterPlan, limits: Limits) -> None:
    count = len({part.module for part in plan.parts})
    if count > limits.max_modules:
        raise ConfigRejected(
            "too_many_targets",
            "target_modules",
            f"The adapter changes {count} modules; you may have {limits.max_modules} in one (adapter_modules). Target "
            "fewer, or ask for more.",
        )


def _check_size(header: SafetensorsHeader, limits: Limits) -> None:
    if header.file_bytes > limits.max_bytes:
        raise WeightsFileRejected(
            "weights_too_large", None, f"The weights have {header.file_bytes} bytes; {limits.max_bytes} are taken."
        )


def _check_invocation(config: LoraConfig, base: BaseDescription) -> None:
    if (largest := max(config.alora_invocation_tokens or (0,))) >= base.vocab_size:
        raise ConfigRejected(
            "config_invalid",
            "alora_invocation_tokens",
            f"alora_invocation_tokens has {largest}; this server's base has the tokens 0 to {base.vocab_size - 1}. Use "
            "the ids that the base's own tokenizer gives.",
        )


def _check_targets(matches: Iterable[Match], config: LoraConfig, base: BaseDescription) -> None:
    vocabulary = base.vocabulary
    served = (vocabulary.embedding, vocabulary.head) if vocabulary else ()
    for match in matches:
        kind = base.others.get(match.module)
        if kind is not None and match.module not in served:
            raise unsupported_target(match.module, kind)
        if match.module in served:
            _check_beside(match.module, vocabulary, config)


def _check_beside(module: str, vocabulary: VocabularyShape | None, config: LoraConfig) -> None:
    """Refuse what PEFT does not do on the embedding or the head, or does to more tokens than it is meant for."""
    of_embedding = vocabulary is not None and module == vocabulary.embedding
    for field, is_on in (
        ("use_dora", config.use_dora and of_embedding),
        ("lora_bias", config.lora_bias and of_embedding),
        ("alora_invocation_tokens", config.alora_invocation_tokens is not None),
    ):
        if is_on:
            raise ConfigRejected(
                "field_unsupported",
                field,
                f"{field} is set and target_modules means {module}, where it is not served. Leave {module} out of "
                f"target_modules, or train without {field}.",
            )


def _matches(config: LoraConfig, base: BaseDescription) -> list[Match]:
    if not config.target_modules:  # target_parameters stands alone
        return []
    return match_targets(config, base, tuple(config.rank_pattern), tuple(config.alpha_pattern))


def _parameter_pairs(config: LoraConfig, base: BaseDescription, limits: Limits) -> Iterator[LoraPair]:
    matches = match_parameters(config, base)
    targeted = [match.module for match in matches]
    for match in matches:
        rank, scale = _rank_and_scale(match, config, limits)
        yield from part_pairs(match.module, targeted, rank, scale, base.parameters[match.module])


def _rank_and_scale(match: Match, config: LoraConfig, limits: Limits) -> tuple[int, float]:
    rank = config.rank_pattern.get(match.rank_key, config.r)
    alpha = config.alpha_pattern.get(match.alpha_key, config.lora_alpha)
    if rank > limits.max_rank:
        raise ConfigRejected(
            "rank_too_large",
            "rank_pattern" if match.rank_key in config.rank_pattern else "r",
            f"{match.module} has rank {rank}; this server takes up to {limits.max_rank}. Train with a smaller r, or "
            "ask the operator to raise adapters.max_rank.",
        )
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _pair(match: Match, config: LoraConfig, base: BaseDescription, limits: Limits) -> LoraPair:
    rank, scale = _rank_and_scale(match, config, limits)
    if (shape := base.modules.get(match.module)) is not None:
        return LoraPair(match.module, rank, scale, shape.in_features, shape.out_features)
    assert base.vocabulary is not None, "targets are linears, the embedding and the head"
    tokens, width = base.vocabulary.num_tokens, base.vocabulary.hidden_size
    if match.module == base.vocabulary.embedding:
        return LoraPair(match.module, rank, scale, tokens, width, EMBEDDING_PAIR)
    return LoraPair(match.module, rank, scale, width, tokens)


def _vectors(pairs: tuple[LoraPair, ...], config: LoraConfig) -> Iterator[VectorPart]:
    for pair in pairs:
        if config.use_dora:
            yield VectorPart(pair.module, VectorKind.MAGNITUDE, pair.out_features)
        if config.lora_bias:
            yield VectorPart(pair.module, VectorKind.LORA_BIAS, pair.out_features, pair.scale)


def _check_vocabulary(plan: AdapterPlan, header: SafetensorsHeader, base: BaseDescription, limits: Limits) -> None:
    """What stands in the pool for the embedding and the head is bounded by a quota of its own."""
    if (vocabulary := base.vocabulary) is None:
        return
    modules = (vocabulary.embedding, vocabulary.head)
    keys = {key for part in plan.parts if part.module in modules for key in part.shapes}
    num_bytes = sum(header.tensors[key].end - header.tensors[key].start for key in keys)
    if num_bytes > limits.max_vocabulary_bytes:
        raise WeightsFileRejected(
            "vocabulary_too_large",
            None,
            f"What the adapter brings for {vocabulary.embedding} and {vocabulary.head} has {num_bytes} bytes; "
            f"{limits.max_vocabulary_bytes} are taken. Save it in bfloat16, train single tokens "
            "(trainable_token_indices), or ask the operator to raise adapters.max_vocabulary_bytes.",
        )

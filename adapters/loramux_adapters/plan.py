"""The plan of an adapter: the tensors that its configuration implies on a base, checked against the file's.

`plan_adapter` derives the exact components (pairs, vectors, rows of tokens) for a LoRA or an IA3. `inspect_adapter`
and `validate_adapter` run the checks of a folder with PEFT's two files, from the cheapest to the most expensive:
configuration, header, tensors, values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from loramux_adapters.base import BaseDescription, ParameterShape, VocabularyShape, expert_name, siblings
from loramux_adapters.components import (
    EMBEDDING_PAIR,
    PREFIX,
    AdapterPlan,
    ClassifierHead,
    ExpertPair,
    HeadLinear,
    LinearVector,
    LoraPair,
    Repeat,
    TiedPair,
    TokenRows,
    VectorKind,
)
from loramux_adapters.config import (
    HEADLESS_TASKS,
    MAX_CONFIG_BYTES,
    AdapterConfig,
    Ia3Config,
    LoraConfig,
    Task,
    parse_adapter_config,
)
from loramux_adapters.errors import BaseMismatch, ConfigRejected, WeightsFileRejected, shown
from loramux_adapters.matching import Match, TargetRules
from loramux_adapters.targets import (
    base_copies,
    check_once,
    check_tensors,
    describe_context,
    match_guarded,
    match_targets,
    repeated_rows,
    resized,
    saved_modules,
    token_rows,
    unsupported_target,
    with_added_rows,
)
from loramux_adapters.tying import Tying, check_tied_target, tie_config, tie_rows
from loramux_adapters.weights_file import SafetensorsHeader, check_finite, read_header

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

CHECKS = ("config", "header", "tensors", "values")
"""Names of the checks, in their order."""

MAX_LABELS = 4096
"""Maximum number of labels of a classifier."""

HEADS: Mapping[str, tuple[str, ...]] = {"SEQ_CLS": ("score",), "TOKEN_CLS": ("score", "classifier")}
"""Names of a classifier's head in transformers' decoder families, by task."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Limits that the operator sets."""

    max_rank: int = 256
    max_bytes: int = 2 << 30
    """Size of the weights file."""
    max_vocabulary_bytes: int = 1 << 30
    """Size, in the file, of the tensors for the embedding and the head."""
    max_modules: int = 1 << 20
    """Modules that one adapter changes."""


@dataclass(frozen=True, slots=True)
class ExaminedAdapter:
    """An adapter that passed every check."""

    config: AdapterConfig
    header: SafetensorsHeader
    plan: AdapterPlan


def inspect_adapter(directory: Path, base: BaseDescription, limits: PlanLimits) -> AdapterPlan:
    """Run every check that does not read the weights; takes milliseconds. Raises AdapterRejected."""
    config = read_config(directory)
    return plan_adapter(config, read_header(directory / WEIGHTS_NAME), base, limits)


def validate_adapter(directory: Path, base: BaseDescription, limits: PlanLimits) -> AdapterPlan:
    """Run every check and return the plan of the adapter in `directory`. Raises AdapterRejected.

    The checks need memory for both headers and a few MiB, independently of the files' sizes.
    """
    return examine_adapter(directory, base, limits, "F32", lambda _: None).plan


def examine_adapter(
    directory: Path, base: BaseDescription, limits: PlanLimits, serving: str, passed: Callable[[str], None]
) -> ExaminedAdapter:
    """Run validate_adapter and call `passed` with the name of each check that passes. Raises AdapterRejected.

    `serving` is the dtype that weights are converted to when they are served: F32, F16 or BF16.
    """
    config = read_config(directory)
    passed("config")
    header = read_header(directory / WEIGHTS_NAME)
    passed("header")
    plan = plan_adapter(config, header, base, limits)
    passed("tensors")
    check_finite(directory / WEIGHTS_NAME, header, serving)
    passed("values")
    return ExaminedAdapter(config, header, plan)


def read_config(directory: Path) -> AdapterConfig:
    """Read `directory`/adapter_config.json, at most 1 MiB of it. Raises ConfigRejected."""
    return parse_adapter_config(read_config_file(directory))


def read_config_file(directory: Path) -> bytes:
    """Read `directory`/adapter_config.json, at most one byte more than is accepted. Raises ConfigRejected."""
    try:
        with (directory / CONFIG_NAME).open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigRejected(
            "config_missing", None, f"There is no {CONFIG_NAME}; PEFT's save_pretrained writes it beside the weights."
        ) from None


def plan_adapter(
    config: AdapterConfig, header: SafetensorsHeader, base: BaseDescription, limits: PlanLimits
) -> AdapterPlan:
    """Plan an adapter whose tensors are exactly those that `config` implies on `base`.

    Raises ConfigRejected (`pattern_invalid`, `pattern_too_slow`, `target_unsupported`, `field_unsupported`,
    `config_invalid`, `rank_too_large`, `scale_invalid`, `too_many_targets`), WeightsFileRejected (`weights_too_large`,
    `vocabulary_too_large`) or BaseMismatch (`no_module_matched`, `tensors_missing`, `tensors_unexpected`,
    `shape_mismatch`).
    """
    check_size(header.file_bytes, limits)
    _check_task(config, base)
    if config.task_type == "TOKEN_CLS":
        base = base.for_tokens()
    if config.task_type in HEADLESS_TASKS:
        base = base.without_head()
    if isinstance(config, Ia3Config):
        plan = _plan_ia3(config, header, base)
    else:
        plan = _plan_lora(config, header, base, limits)
    if config.task_type is not None and config.task_type in HEADS:
        plan = replace(plan, classifier=_classifier(config.task_type, header, base))
    plan = _without_absent(plan, header)
    trained_on = describe_context(base, config.base_model_name_or_path)
    check_tensors(plan.shapes, header, trained_on, plan.optional_shapes)
    _check_vocabulary(plan, header, base, limits)
    _check_modules(plan, limits)
    return plan


def _plan_lora(config: LoraConfig, header: SafetensorsHeader, base: BaseDescription, limits: PlanLimits) -> AdapterPlan:
    wide = resized(base, header, _trained(config))
    _check_invocation(config, wide)
    config, tying = tie_config(config, base)
    matches = _matches(config, base)
    _check_targets(matches, config, base)
    if wide != base:
        _check_resized(matches, base, wide)
    pairs = tuple(_pair(match, config, base, limits) for match in matches)
    saved, norms = _saved(config, wide)
    tied: tuple[Repeat, ...] = ()
    if tying is Tying.SAVED:
        saved, tied = tie_rows(saved, wide, header)
    elif tying is Tying.PAIR:
        head = _tied_pair(pairs, config, base, limits)
        pairs, tied = (*pairs, head), head.repeats
    rows = (*saved, *token_rows(config.trainable_token_indices, config.ensure_weight_tying, wide))
    targeted = [pair.module for pair in pairs]
    check_once(targeted, rows)
    vectors = (*_vectors(pairs, config), *norms)
    pairs += tuple(_parameter_pairs(config, base, limits))
    vectors += tuple(_biases(targeted, config, header, base))
    copies, repeats = base_copies(targeted, rows, wide), (*tied, *repeated_rows(rows))
    rows = with_added_rows(rows, base, wide, copies)
    plan = AdapterPlan(pairs, header.file_bytes, config.alora_invocation_tokens, vectors, rows, copies, repeats)
    return plan if wide == base else replace(plan, num_tokens=_num_tokens(wide))


def _classifier(task: str, header: SafetensorsHeader, base: BaseDescription) -> ClassifierHead:
    """Return the head in the file. Raises BaseMismatch (`tensors_missing`) or ConfigRejected (`too_many_labels`)."""
    if base.encoder is None:
        name = next((one for one in HEADS[task] if f"{PREFIX}{one}.weight" in header.tensors), HEADS[task][0])
        has_bias = task == "TOKEN_CLS" and f"{PREFIX}{name}.bias" in header.tensors
        linears = [HeadLinear(name, 1, base.hidden_size, has_bias)]
    else:
        names = base.encoder.head if task == "SEQ_CLS" else base.encoder.head_of_tokens
        has_bias = base.encoder.head_has_bias
        linears = [HeadLinear(name, base.hidden_size, base.hidden_size, has_bias) for name in names]
    last = linears[-1]
    if last.key not in header.tensors:
        raise BaseMismatch(
            "tensors_missing",
            last.key,
            f"task_type is {task}, and the file has no {last.key}, the trained head. Save the adapter with PEFT's "
            "save_pretrained, which stores it.",
        )
    shape = header.tensors[last.key].shape
    num_labels = shape[0] if len(shape) == 2 else 1
    if num_labels > MAX_LABELS:
        raise ConfigRejected(
            "too_many_labels", last.key, f"The classifier has {num_labels} labels; the maximum is {MAX_LABELS}."
        )
    return ClassifierHead((*linears[:-1], replace(last, out_features=max(num_labels, 1))))


def task_of(config: AdapterConfig, base: BaseDescription) -> Task:
    """Return the task for which an adapter of `base` was trained; without a name, text, and vectors of an encoder."""
    return config.task_type or ("CAUSAL_LM" if base.encoder is None else "FEATURE_EXTRACTION")


def _check_task(config: AdapterConfig, base: BaseDescription) -> None:
    """Refuse a task that an encoder cannot do. Raises ConfigRejected (`field_unsupported`)."""
    if base.encoder is None:
        return
    reason = None
    if config.task_type == "CAUSAL_LM":
        reason = (
            "This base is an encoder, which generates no text: adapters for vectors (FEATURE_EXTRACTION), for classes "
            "of texts (SEQ_CLS) and of tokens (TOKEN_CLS) are served."
        )
    elif not (base.encoder.head_of_tokens if config.task_type == "TOKEN_CLS" else base.encoder.head) and (
        config.task_type in HEADS
    ):
        reason = (
            "transformers has no class of this base with such a head, so PEFT cannot have trained one: "
            f"{'adapters for classes of texts (SEQ_CLS) and ' if base.encoder.head else 'adapters '}"
            "for vectors (FEATURE_EXTRACTION) are served."
        )
    elif base.lacks_transform and base.encoder.has_transform(config.task_type):
        reason = (
            f"The base's checkpoint has no weights of {base.encoder.transform}, which a classifier reads: they were "
            "random in the training, and PEFT saves them only if modules_to_save names them. Train on a checkpoint "
            "that has them."
        )
    if reason is not None:
        raise ConfigRejected("field_unsupported", "task_type", f"task_type is {config.task_type}. {reason}")


def _trained(config: LoraConfig) -> Iterable[int]:
    indices = config.trainable_token_indices or ()
    return chain.from_iterable(indices.values()) if isinstance(indices, Mapping) else indices


def _num_tokens(base: BaseDescription) -> int | None:
    return None if base.vocabulary is None else base.vocabulary.num_tokens


def _check_resized(matches: Iterable[Match], base: BaseDescription, wide: BaseDescription) -> None:
    """Refuse factors of a resized embedding or head, because their shape differs from the base's, and tokens without
    inputs for the layers."""
    vocabulary, added = base.vocabulary, (_num_tokens(wide) or 0) - (_num_tokens(base) or 0)
    if base.has_inputs_by_layer and added > 0:
        raise ConfigRejected(
            "field_unsupported",
            "trainable_token_indices",
            f"The adapter adds {added} tokens to the vocabulary. Layers of this base read each token's row in another "
            "table, and PEFT saves no rows of that table. Train with the base's own tokens.",
        )
    for match in matches:
        if vocabulary is not None and match.module in (vocabulary.embedding, vocabulary.head):
            raise ConfigRejected(
                "field_unsupported",
                "target_modules",
                f"target_modules means {match.module}, which was resized before training. Train it whole "
                "(modules_to_save), or the added tokens alone (trainable_token_indices).",
            )


def _plan_ia3(config: Ia3Config, header: SafetensorsHeader, base: BaseDescription) -> AdapterPlan:
    vectors, (rows, norms) = ia3_vectors(config, base), _saved(config, base)
    targeted = [vector.module for vector in vectors]
    check_once(targeted, rows)
    copies, repeats = base_copies(targeted, rows, base), repeated_rows(rows)
    return AdapterPlan((), header.file_bytes, None, (*vectors, *norms), rows, copies, repeats)


def _saved(config: AdapterConfig, base: BaseDescription) -> tuple[tuple[TokenRows, ...], tuple[LinearVector, ...]]:
    parts = tuple(saved_modules(config.modules_to_save, base))
    rows = tuple(part for part in parts if isinstance(part, TokenRows))
    return rows, tuple(part for part in parts if isinstance(part, LinearVector))


def _without_absent(plan: AdapterPlan, header: SafetensorsHeader) -> AdapterPlan:
    """Drop the targeted modules without any tensor in the file, unless no module has a tensor."""
    keys: dict[str, set[str]] = {}
    parts: tuple[LoraPair | LinearVector, ...] = (*plan.pairs, *plan.vectors)
    for part in parts:
        keys.setdefault(part.module, set()).update(part.shapes)
    absent = tuple(module for module, names in keys.items() if names.isdisjoint(header.tensors))
    if not absent or len(absent) == len(keys):
        return plan
    rest = plan.on({part.module for part in plan.components} - set(absent))
    return replace(rest, copies=plan.copies, absent=absent)


def _biases(
    targeted: Collection[str], config: LoraConfig, header: SafetensorsHeader, base: BaseDescription
) -> Iterator[LinearVector]:
    """Yield the trained biases of linears that the file holds. Only the base's weights show which linears have a
    bias."""
    if config.bias == "none":
        return
    for module, shape in base.modules.items():
        vector = LinearVector(module, VectorKind.BIAS, shape.out_features, wrapped=module in targeted)
        if vector.key in header.tensors:
            yield vector
    trained = (key for key in header.tensors if key.endswith(".bias") and not key.endswith(".lora_B.bias"))
    of_linears = {f"{PREFIX}{module}" for module in base.modules}
    for key in trained:
        if key.removesuffix(".bias").removesuffix(".base_layer") not in of_linears:
            raise ConfigRejected(
                "field_unsupported",
                "bias",
                f"bias is {config.bias!r} and the file holds {key[:160]!r}, which is no linear's. Trained biases of "
                "linear layers are served, those of norms are not. Train with bias='none'; lora_bias=true is served.",
            )


def _check_modules(plan: AdapterPlan, limits: PlanLimits) -> None:
    count = len({part.module for part in plan.components})
    if count > limits.max_modules:
        raise ConfigRejected(
            "too_many_targets",
            "target_modules",
            f"The adapter changes {count} modules; the maximum is {limits.max_modules} (adapter_modules). Target "
            "fewer, or ask for more.",
        )


def check_size(num_bytes: int, limits: PlanLimits) -> None:
    """Raise WeightsFileRejected (`weights_too_large`)."""
    if num_bytes > limits.max_bytes:
        raise WeightsFileRejected(
            "weights_too_large",
            None,
            f"The weights have {num_bytes} bytes, as they are or as they would be served; the maximum is "
            f"{limits.max_bytes}.",
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
    """Refuse fields that PEFT ignores on the embedding or the head, or applies to more tokens than intended."""
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
    if not config.target_modules:  # target_parameters alone
        return []
    return match_targets(config, base, tuple(config.rank_pattern), tuple(config.alpha_pattern))


def _parameter_pairs(config: LoraConfig, base: BaseDescription, limits: PlanLimits) -> Iterator[LoraPair]:
    matches = match_parameters(config, base)
    targeted = [match.module for match in matches]
    for match in matches:
        rank, scale = rank_and_scale(match, config, limits)
        yield from expert_pairs(match.module, targeted, rank, scale, base.parameters[match.module])


def rank_and_scale(match: Match, config: LoraConfig, limits: PlanLimits) -> tuple[int, float]:
    """Return the rank and scale of one target. Raises ConfigRejected (`rank_too_large`)."""
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


def _pair(match: Match, config: LoraConfig, base: BaseDescription, limits: PlanLimits) -> LoraPair:
    rank, scale = rank_and_scale(match, config, limits)
    if (shape := base.modules.get(match.module)) is not None:
        return LoraPair(match.module, rank, scale, shape.in_features, shape.out_features)
    assert base.vocabulary is not None, "targets are linears, the embedding and the head"
    tokens, width = base.vocabulary.num_tokens, base.vocabulary.hidden_size
    if match.module == base.vocabulary.embedding:
        return LoraPair(match.module, rank, scale, tokens, width, EMBEDDING_PAIR)
    return LoraPair(match.module, rank, scale, width, tokens)


def _tied_pair(pairs: Iterable[LoraPair], config: LoraConfig, base: BaseDescription, limits: PlanLimits) -> TiedPair:
    """Return the head's pair: the embedding's at the head's own scale."""
    vocabulary, by_module = base.vocabulary, {pair.module: pair for pair in pairs}
    assert vocabulary is not None, "tied"
    check_tied_target(by_module, base)
    rules = TargetRules((vocabulary.head,), None, None, None, tuple(config.rank_pattern), tuple(config.alpha_pattern))
    [match] = match_guarded(rules, (vocabulary.head,))
    _, scale = rank_and_scale(match, config, limits)
    rank, width = by_module[vocabulary.embedding].rank, vocabulary.hidden_size
    return TiedPair(vocabulary.head, rank, scale, width, vocabulary.num_tokens, embedding=vocabulary.embedding)


def _vectors(pairs: tuple[LoraPair, ...], config: LoraConfig) -> Iterator[LinearVector]:
    for pair in pairs:
        if config.use_dora:
            yield LinearVector(pair.module, VectorKind.MAGNITUDE, pair.out_features)
        if config.lora_bias:
            yield LinearVector(pair.module, VectorKind.LORA_BIAS, pair.out_features, pair.scale)


def _check_vocabulary(plan: AdapterPlan, header: SafetensorsHeader, base: BaseDescription, limits: PlanLimits) -> None:
    """Bound the tensors for the embedding and the head by a separate quota."""
    if (vocabulary := base.vocabulary) is None:
        return
    modules = (vocabulary.embedding, vocabulary.head)
    parts = [part for part in plan.components if part.module in modules]
    # Only the served rows of a copy count.
    copied = {part.copied.key: part.copied for part in parts if isinstance(part, TokenRows) and part.copied}
    keys = [
        key for part in parts for key in part.shapes if key not in copied
    ]  # two times, if embedding and head are both served from it
    num_bytes = sum(header.tensors[key].end - header.tensors[key].start for key in keys)
    for key, rows in copied.items():
        info = header.tensors[key]
        num_bytes += (info.end - info.start) * len(rows.token_ids) // rows.num_tokens
    if num_bytes > limits.max_vocabulary_bytes:
        raise WeightsFileRejected(
            "vocabulary_too_large",
            None,
            f"The adapter's part for {vocabulary.embedding} and {vocabulary.head} has {num_bytes} bytes; "
            f"the maximum is {limits.max_vocabulary_bytes}. Save it in bfloat16, train single tokens "
            "(trainable_token_indices), or ask the operator to raise adapters.max_vocabulary_bytes.",
        )


def ia3_vectors(config: Ia3Config, base: BaseDescription) -> tuple[LinearVector, ...]:
    """Return a vector for each targeted linear, in the order of the base's modules.

    Raises ConfigRejected (`pattern_invalid`, `pattern_too_slow`, `target_unsupported`) or BaseMismatch
    (`no_module_matched`).
    """
    feed_forward = _feed_forward(config.feedforward_modules, base)
    matches = match_targets(config, base, (), ())
    return tuple(_vector(match.module, match.module in feed_forward, base) for match in matches)


def _feed_forward(written: str | Sequence[str], base: BaseDescription) -> frozenset[str]:
    if not isinstance(written, str):
        return frozenset(name for name in base.names if any(name.endswith(end) for end in written))
    matches = match_guarded(TargetRules(written, None, None, None, (), (), "feedforward_modules"), base.names)
    return frozenset(match.module for match in matches)


def _vector(module: str, is_feed_forward: bool, base: BaseDescription) -> LinearVector:
    vocabulary = base.vocabulary
    if vocabulary is not None and module == vocabulary.head:
        if not is_feed_forward:
            return LinearVector(module, VectorKind.OUTPUT, vocabulary.num_tokens)
        raise _unsupported(module, "feedforward_modules", "the output head, whose input is not scaled")
    shape = base.modules.get(module)
    if shape is None or shape.transposed:
        raise _unsupported(module, "target_modules", f"a {base.others.get(module, 'Conv1D')}")
    if not is_feed_forward:
        return LinearVector(module, VectorKind.OUTPUT, shape.out_features)
    if others := siblings(module, base.modules):
        reason = f"which reads the same input as {', '.join(others)} and is computed together with it"
        raise _unsupported(module, "feedforward_modules", reason)
    return LinearVector(module, VectorKind.INPUT, shape.in_features)


def _unsupported(module: str, field: str, reason: str) -> ConfigRejected:
    return ConfigRejected(
        "target_unsupported",
        field,
        f"{field} means {module!r}, {reason}. IA3 is served on linear layers' outputs and, for feedforward_modules, on "
        "the inputs of down_proj and others that read an input of their own.",
    )


def match_parameters(config: LoraConfig, base: BaseDescription) -> list[Match]:
    """Return the parameters that target_parameters names, whole or by their ends, in the base's order.

    Raises ConfigRejected (`target_unsupported`, `pattern_invalid`, `pattern_too_slow`).
    """
    wanted = config.target_parameters or ()
    for target in wanted:
        if not any(_means(target, name) for name in base.parameters):
            raise ConfigRejected("target_unsupported", "target_parameters", _unknown(target, base))
    found = tuple(name for name in base.parameters if any(_means(target, name) for target in wanted))
    if not found:
        return []
    # PEFT checks nothing else for a parameter: exclude_modules and layers_to_transform apply to modules.
    rules = TargetRules(found, None, None, None, tuple(config.rank_pattern), tuple(config.alpha_pattern))
    return match_guarded(rules, found)


def expert_pairs(
    parameter: str, targeted: Sequence[str], rank: int, scale: float, shape: ParameterShape
) -> Iterator[ExpertPair]:
    """Yield a pair for each expert; `targeted` are all parameters of the adapter, in the base's order."""
    holder = expert_holder(parameter, targeted)
    for expert in range(shape.num_experts):
        yield ExpertPair(
            expert_name(parameter, expert),
            rank,
            scale,
            shape.in_features,
            shape.out_features,
            holder=holder,
            expert=expert,
            num_experts=shape.num_experts,
        )


def expert_holder(parameter: str, targeted: Sequence[str]) -> str:
    """Name a parameter's module in the file: PEFT wraps it once for each parameter, and the last wrapper is the
    outermost.
    """
    module = parameter.rpartition(".")[0]
    outer = [other for other in targeted[targeted.index(parameter) + 1 :] if other.rpartition(".")[0] == module]
    return module + ".base_layer" * len(outer)


def _means(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _unknown(target: str, base: BaseDescription) -> str:
    ends = tuple(dict.fromkeys(".".join(name.split(".")[-2:]) for name in base.parameters))
    served = f"served are {shown(ends)}" if ends else "this base has none that is served"
    return (
        f"target_parameters names {target[:120]!r}; of parameters that are no linear's, {served}. Train linears with "
        "target_modules instead."
    )

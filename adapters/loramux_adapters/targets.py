"""Targets of a configuration on a base: the modules that the configuration changes, and the matrices, norms and token
rows that it replaces.

Patterns of adapter_config.json are regular expressions of a customer. Python's `re` backtracks, holds the
interpreter's lock and cannot be interrupted: `(.+)+x` would stop every thread, and even compiling can take minutes.
Plain expressions (names: nearly everything that PEFT writes) are safe and are matched here by PEFT's rules
(`matching`). Any other expression is matched by a child process with limits on processor time and memory
(`match_guarded`).

Modules that an adapter replaces whole (embedding, output head, norms), and the rows of single tokens, follow
`_set_trainable` and `set_additional_trainable_modules` (peft/utils/other.py) of PEFT 0.21.2.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loramux_adapters import matching
from loramux_adapters.base import BaseDescription, VocabularyShape
from loramux_adapters.components import PREFIX, BaseCopy, CopiedRows, LinearVector, Repeat, TokenRows, VectorKind
from loramux_adapters.config import Targets
from loramux_adapters.errors import BaseMismatch, ConfigRejected, shown
from loramux_adapters.matching import InvalidExpression, Match, TargetRules, expressions, match_modules
from loramux_adapters.weights_file import SafetensorsHeader

CPU_SECONDS = 0.5
CPU_SECONDS_PER_NAME = 1e-4
"""Processor time of the child, of which the larger limit counts. A mixture's experts may be eighteen thousand names."""
MEMORY_BYTES = 256 << 20
WALL_SECONDS = 60
"""A safety net for a child that a starved machine never runs; processor time is the real limit."""

_ESCAPED = re.compile(r"\\.", re.DOTALL)
_DEMANDING = re.compile(r"[*+?{|(\[]")

_WAY_OUT = "Train it without, or merge it into a base of your own."

MAX_ADDED_TOKENS = 1 << 16
_MATRICES = ("weight", "modules_to_save.weight", "original_module.weight", "base_layer.weight")
"""Names, after the module's, under which PEFT saves a whole matrix."""

Shapes = Mapping[str, tuple[int, ...]]


def match_guarded(rules: TargetRules, names: Sequence[str]) -> list[Match]:
    """Return what match_modules returns. Raises ConfigRejected: `pattern_invalid` or `pattern_too_slow`."""
    demanding = next((pair for pair in expressions(rules) if is_demanding(pair[1])), None)
    try:
        if demanding is None:
            return match_modules(rules, names)
        return _match_in_child(rules, names, *demanding)
    except InvalidExpression as error:
        raise ConfigRejected(
            "pattern_invalid",
            error.field,
            f"{error.field} holds {error.written[:120]!r}, which is no regular expression: {error.reason}.",
        ) from None


def is_demanding(expression: str) -> bool:
    """True if compiling or matching may cost more than reading: the expression repeats, alternates, groups or has
    classes."""
    return _DEMANDING.search(_ESCAPED.sub("", expression)) is not None


def _match_in_child(rules: TargetRules, names: Sequence[str], field: str, expression: str) -> list[Match]:
    cpu_seconds = max(CPU_SECONDS, CPU_SECONDS_PER_NAME * len(names))
    answer = _ask_child({"rules": rules, "names": names}, cpu_seconds)
    if answer is None:
        raise ConfigRejected(
            "pattern_too_slow",
            field,
            f"The regular expressions of adapter_config.json need more than {cpu_seconds:g} s for this base's "
            f"{len(names)} module names; {field} holds {expression[:120]!r}. Write target_modules as a list of names, "
            "and the keys of rank_pattern and alpha_pattern as plain names.",
        )
    if "invalid" in answer:
        raise InvalidExpression(*answer["invalid"])
    return [Match(*match) for match in answer["matches"]]


def _ask_child(question: dict[str, Any], cpu_seconds: float) -> dict[str, Any] | None:
    # -I and -S: only the standard library, without the environment.
    command = [sys.executable, "-I", "-S", str(Path(matching.__file__)), str(cpu_seconds), str(MEMORY_BYTES)]
    try:
        child = subprocess.run(  # noqa: S603 - our own file, and what the customer wrote goes through stdin
            command, input=json.dumps(question), capture_output=True, text=True, timeout=WALL_SECONDS, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return None
    answer: dict[str, Any] = json.loads(child.stdout)
    return answer


def match_targets(
    config: Targets, base: BaseDescription, rank_keys: Sequence[str], alpha_keys: Sequence[str]
) -> list[Match]:
    """Return the modules that `config` targets, in the base's order; at least one.

    Raises ConfigRejected (`pattern_invalid`, `pattern_too_slow`) or BaseMismatch (`no_module_matched`).
    """
    rules = TargetRules(
        target_modules=tuple(base.modules) if config.all_linear else config.target_modules,
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform,
        layers_pattern=config.layers_pattern,
        rank_keys=rank_keys,
        alpha_keys=alpha_keys,
    )
    matches = match_guarded(rules, base.names)
    if not matches:
        raise BaseMismatch(
            "no_module_matched",
            "target_modules",
            f"target_modules {_written(config.target_modules)} matches no module of this server's base. "
            f"{_expects(base)}",
        )
    return matches


def check_linears(matches: Iterable[Match], base: BaseDescription) -> None:
    """Raise ConfigRejected (`target_unsupported`) unless all are linears that adapters may touch."""
    for match in matches:
        if (kind := base.others.get(match.module)) is not None:
            raise unsupported_target(match.module, kind)


def describe_context(base: BaseDescription, trained_on: str | None) -> str:
    """Describe the base and the base that the adapter claims: the end of a message about a mismatch."""
    named = f" The adapter says it was trained on {trained_on[:120]!r}." if trained_on else ""
    return f"{_expects(base)}{named}"


def unsupported_target(module: str, kind: str) -> ConfigRejected:
    """Return the refusal of a target of class `kind`."""
    return ConfigRejected(
        "target_unsupported",
        "target_modules",
        f"target_modules names {module!r}, a {kind} and no linear layer of the decoder. Train on those, e.g. with "
        "all-linear.",
    )


def _written(target_modules: str | tuple[str, ...]) -> str:
    return repr(target_modules[:120]) if isinstance(target_modules, str) else shown(target_modules)


def _expects(base: BaseDescription) -> str:
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in base.modules)
    return (
        f"The base is a {base.architecture} with {base.num_layers} layers of hidden size {base.hidden_size}; its "
        f"linear layers are {shown(tuple(leaves), limit=12)}."
    )


def check_tensors(
    expected: Shapes, header: SafetensorsHeader, context: str, optional: Shapes = MappingProxyType({})
) -> None:
    """Raise BaseMismatch (`tensors_missing`, `tensors_unexpected`, `shape_mismatch`) unless the file holds `expected`.

    The file may also hold any of `optional`. `context` ends each message; see describe_context.
    """
    if missing := [key for key in expected if key not in header.tensors]:
        raise BaseMismatch(
            "tensors_missing",
            missing[0],
            f"{len(missing)} of the {len(expected)} tensors that adapter_config.json implies on this base are not in "
            f"the file: {shown(missing)}. {_why_missing(missing[0], header)}{context}",
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
            f"{len(wrong)} of {len(found)} tensors have another shape than rank and base imply: {listed}. "
            f"{_partitioned(wrong, header)}{context}",
        )


def _why_missing(missing: str, header: SafetensorsHeader) -> str:
    """Return what the file shows of a missing tensor: it holds none at all, or holds this one under another prefix."""
    if not header.tensors:
        return (
            "The file holds no tensor at all: PEFT found none to save, for example in the layers of a model that FSDP "
            "has wrapped. Load the run's checkpoint into PEFT's model without the wrapper and save it again. "
        )
    name = missing.removeprefix(PREFIX)
    found = next((key for key in header.tensors if key.endswith(f".{name}")), None)
    if found is None:
        return ""
    prefix = found.removesuffix(name)
    return f"The file has {found!r}: under {prefix[:120]!r} in place of {PREFIX!r}, a module that wraps it. "


def _partitioned(wrong: Iterable[str], header: SafetensorsHeader) -> str:
    """Return the way out if a tensor is empty, as DeepSpeed's ZeRO-3 holds it between steps."""
    if all(0 not in header.tensors[key].shape for key in wrong):
        return ""
    return (
        "Empty tensors are those of a model that DeepSpeed ZeRO-3 has divided: save with the trainer's save_model and "
        "stage3_gather_16bit_weights_on_model_save, or turn the checkpoint into one file with zero_to_fp32.py. "
    )


def resized(base: BaseDescription, header: SafetensorsHeader, trained: Iterable[int]) -> BaseDescription:
    """Return `base` with as many tokens as the adapter was trained with: the tokens of the file's whole matrices.

    Without a matrix, `trained` tokens outside of the base's vocabulary count as new tokens. Raises BaseMismatch
    (`shape_mismatch`).
    """
    if (vocabulary := base.vocabulary) is None:
        return base
    names = (*_MATRICES, "token_adapter.base_layer.weight")
    keys = [f"{PREFIX}{module}.{name}" for module in (vocabulary.embedding, vocabulary.head) for name in names]
    found = {key: header.tensors[key].shape for key in keys if key in header.tensors}
    sizes = {shape[0] for shape in found.values() if shape[1:] == (vocabulary.hidden_size,)}
    if len(sizes) > 1:
        listed = "; ".join(f"{key} is {list(shape)}" for key, shape in found.items())
        raise BaseMismatch("shape_mismatch", next(iter(found)), f"The file's matrices have several sizes: {listed}.")
    last = max((token + 1 for token in trained), default=0)
    num_tokens = sizes.pop() if sizes else max(vocabulary.num_tokens, last)
    if num_tokens > vocabulary.num_tokens + MAX_ADDED_TOKENS:
        return base  # no adapter adds so many tokens, so the checks name the token or the matrix
    return replace(base, vocabulary=replace(vocabulary, num_tokens=num_tokens))


def with_added_rows(
    rows: Sequence[TokenRows], base: BaseDescription, wide: BaseDescription, copies: Iterable[BaseCopy]
) -> tuple[TokenRows, ...]:
    """Return `rows` with the rows of tokens that `wide` has and `base` lacks, in the embedding and in the head.

    Trained rows are already in `rows`. All other rows are in the copies that PEFT saves of a resized embedding.
    """
    if base.vocabulary is None or wide.vocabulary is None or wide == base:
        return tuple(rows)
    num_tokens, width = wide.vocabulary.num_tokens, wide.vocabulary.hidden_size
    keys = {copy.module: copy.key for copy in copies}
    found = {part.module: part for part in rows}
    for module in (wide.vocabulary.embedding, wide.vocabulary.head):
        if module not in wide.others:
            continue  # trained without the head
        part = found.get(module)
        if part is not None and part.token_ids is None:
            continue  # saved whole
        known = part.token_ids or () if part else ()
        missing = tuple(sorted(set(range(base.vocabulary.num_tokens, num_tokens)) - set(known)))
        if missing:
            copied = CopiedRows(keys[module], missing, num_tokens)
            part = replace(part, copied=copied) if part else TokenRows(module, "", 0, width, (), copied)
            found[module] = part
    return tuple(found.values())


def saved_modules(names: Sequence[str] | None, base: BaseDescription) -> Iterator[TokenRows | LinearVector]:
    """Yield the matrices and norms of `modules_to_save`. Raises ConfigRejected (`target_unsupported`)."""
    for module in (m for m in base.names if any(m.endswith(name) for name in names or ())):
        vocabulary = base.vocabulary
        if (width := base.norms.get(module)) is not None:
            yield LinearVector(module, VectorKind.NORM, width)
            continue
        if vocabulary is None or module not in (vocabulary.embedding, vocabulary.head):
            kind = base.others.get(module, "linear layer")
            raise ConfigRejected(
                "target_unsupported",
                "modules_to_save",
                f"modules_to_save means {module!r}, a {kind}. Whole copies of the embedding, of the output head and "
                f"of norms are served, and of no other module. {_WAY_OUT}",
            )
        yield TokenRows(module, f"{PREFIX}{module}.weight", vocabulary.num_tokens, vocabulary.hidden_size, None)


def token_rows(
    indices: Sequence[int] | Mapping[str, Sequence[int]] | None, ensure_weight_tying: bool, base: BaseDescription
) -> Iterator[TokenRows]:
    """Yield the rows of `trainable_token_indices`.

    On a tied base the embedding's rows replace the head's too, unless the field names other tokens for the head. PEFT
    then trains and saves the rows of each separately.

    Raises ConfigRejected: `target_unsupported`, `config_invalid`.
    """
    if not indices:
        return
    vocabulary = base.vocabulary
    if vocabulary is None:
        raise _rejected("target_unsupported", f"This base's embedding and head take none. {_WAY_OUT}")
    listed = indices if isinstance(indices, Mapping) else {vocabulary.embedding: indices}
    ids_of: dict[str, Sequence[int]] = {}
    for name, ids in listed.items():
        module = _vocabulary_module(name, vocabulary, base)
        if module in ids_of:
            raise _rejected("config_invalid", f"It names {module} twice.")
        _check_ids(ids, vocabulary)
        ids_of[module] = ids
    embedding, head = vocabulary.embedding, vocabulary.head
    is_shared = embedding in ids_of and ids_of.get(head, ids_of[embedding]) == ids_of[embedding]
    if vocabulary.tied and ensure_weight_tying and len(ids_of) > 1 and not is_shared:
        raise _rejected(
            "config_invalid",
            "It names different tokens for the embedding and the head, and ensure_weight_tying is set; PEFT cannot "
            "load it either. Name the same tokens in the same order, or set ensure_weight_tying to false.",
        )
    sources = {module: module for module in ids_of}  # by module, the module whose rows the file holds
    if vocabulary.tied and is_shared and head in base.others:  # else trained without the head
        sources[head] = embedding
    for module, source in sources.items():
        key = f"{PREFIX}{source}.token_adapter.trainable_tokens_delta"
        yield TokenRows(module, key, len(ids_of[source]), vocabulary.hidden_size, tuple(ids_of[source]))


def _vocabulary_module(name: str, vocabulary: VocabularyShape, base: BaseDescription) -> str:
    """Return the embedding or the head, if `name` means one of them. Raises ConfigRejected (`target_unsupported`)."""
    served = (vocabulary.embedding, vocabulary.head)
    modules = [module for module in base.names if module.endswith(name)]
    if len(modules) != 1 or modules[0] not in served:
        raise _rejected(
            "target_unsupported",
            f"It names {name[:120]!r}, which means {shown(modules) or 'nothing'}; on this base it may mean "
            f"{' or '.join(served)}.",
        )
    return modules[0]


def _check_ids(ids: Sequence[int], vocabulary: VocabularyShape) -> None:
    if not ids:
        raise _rejected("config_invalid", "It has a list without a token.")
    if len(set(ids)) < len(ids):
        raise _rejected("config_invalid", "It names a token twice.")
    if max(ids) >= vocabulary.num_tokens:
        raise _rejected(
            "config_invalid",
            f"It names token {max(ids)}; this base has {vocabulary.num_tokens}. If the vocabulary was "
            "extended in training, it is another base.",
        )


def base_copies(targeted: Collection[str], rows: Iterable[TokenRows], base: BaseDescription) -> tuple[BaseCopy, ...]:
    """Return the base's own matrices that PEFT saves with an adapter if `save_embedding_layers` is on."""
    if (vocabulary := base.vocabulary) is None:
        return ()
    names = dict.fromkeys((vocabulary.embedding, vocabulary.head), "weight")
    names |= {module: "base_layer.weight" for module in names if module in targeted}
    for part in rows:
        names[part.module] = "original_module.weight" if part.token_ids is None else "token_adapter.base_layer.weight"
    shape = vocabulary.num_tokens, vocabulary.hidden_size
    return tuple(BaseCopy(module, *shape, name) for module, name in names.items())


def repeated_rows(rows: Iterable[TokenRows]) -> tuple[Repeat, ...]:
    """Return the second names under which PEFT saves rows once more with `save_embedding_layers`."""
    names = {
        part: "modules_to_save.weight" if part.token_ids is None else "token_adapter.trainable_tokens_delta"
        for part in rows
    }
    keys = ((f"{PREFIX}{part.module}.{name}", part.key) for part, name in names.items())
    return tuple(Repeat(key, original) for key, original in keys if key != original)


def check_once(targeted: Iterable[str], rows: Sequence[TokenRows]) -> None:
    """Raise ConfigRejected (`config_invalid`) if two fields change the same module, because PEFT does not define their
    order.
    """
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


def _rejected(code: str, reason: str) -> ConfigRejected:
    return ConfigRejected(
        code, "trainable_token_indices", f"trainable_token_indices cannot be served as it is. {reason}"
    )

"""The bundle stage's process: a trainer's other files become one `bundle.json`, or are refused with the name of the
fault.

No field of the files is ignored silently. A field is served, is known to have no effect here, has its neutral value, or
is refused.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Callable, Mapping, Set
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from loramux.catalog.validation.jobs import BundleJob, BundleSetup, Check, ReportWarning, ValidationReport
from loramux.catalog.validation.task_files import is_encoder, labels_of, of_model
from loramux.common.bundle import (
    BUNDLE_FILE,
    GENERATION_FILE,
    LENGTH_FILE,
    MAX_ADDED_TOKENS,
    MAX_BUNDLE_BYTES,
    MAX_TEMPLATE_CHARACTERS,
    MODEL_FILE,
    NO_BUNDLE,
    OLD_TOKENS_FILE,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    AddedToken,
    Bundle,
    ProblemType,
    SamplingDefaults,
    VectorPooling,
    encode_bundle,
    extend_tokenizer,
)
from loramux.common.sampling import RECOMMENDED, with_numbers
from loramux.common.sentence_files import (
    FIRST_TOKEN,
    BundleRejected,
    read_object,
    read_text,
    refuse_dense,
    sentence_pooling,
)
from loramux.common.settings.serving import ToolParser
from loramux.common.tokenizer_file import LoadedTokenizer, load_tokenizer, read_tokenizer, tokenizer_difference

logger = logging.getLogger(__name__)

BUNDLE_CHECK = "bundle"
_DENSE_OF_BASE = (
    "An adapter's vectors pass through the Dense modules of its base, and never through its own. Freeze them in the "
    "training, and remove them from modules.json."
)

T = TypeVar("T")

_SECTIONS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
"""Parts of tokenizer.json that decide how text becomes tokens; truncation and padding matter only for training."""

_GENERATION_READ = frozenset((*RECOMMENDED, "max_new_tokens", "eos_token_id", "stop_strings", "do_sample"))
_GENERATION_HARMLESS = frozenset(
    (
        *("transformers_version", "_from_model_config", "use_cache", "pad_token_id", "bos_token_id", "max_length"),
        *("cache_implementation", "cache_config", "max_cache_len", "output_attentions", "output_hidden_states"),
        *("output_scores", "output_logits", "return_dict_in_generate", "compile_config", "disable_compile"),
        *("low_memory", "prefill_chunk_size", "continuous_batching_config", "decoder_start_token_id", "use_mtp"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "length_penalty", "early_stopping"),
    )
)
"""Fields that change the computation of an answer but not the answer, or that affect only beam search."""
_GENERATION_NEUTRAL: Mapping[str, object] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "top_h", "guidance_scale"), 1.0),
}
"""Values without effect, by field. For other fields these are null, false, 0 and empty values."""
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class _Settings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a loramux.toml."""

    tool_parser: ToolParser | None = None
    stop: tuple[str, ...] = ()
    system_prompt: str | None = None
    description: str | None = None
    license: str | None = None
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None
    pooling: VectorPooling | None = None
    matryoshka_dimensions: tuple[int, ...] = ()


@with_numbers(RECOMMENDED, lambda _: None)
class _Generation(msgspec.Struct, kw_only=True):
    """The fields of a generation_config.json that are served."""

    max_new_tokens: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    stop_strings: str | tuple[str, ...] | None = None
    do_sample: bool | None = None


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function for one job. The fork server calls `prepare` once."""
    base = BaseText(Path(msgspec.json.decode(setup, type=BundleSetup).model_dir))
    base.load()
    return lambda job: msgspec.json.encode(examine(msgspec.json.decode(job, type=BundleJob), base))


class BaseText:
    """The base's tokenizer and template, with which uploads are compared."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir

    def load(self) -> None:
        """Read the tokenizer and the template, once for all jobs."""
        self.sections  # noqa: B018 - it is cached

    @cached_property
    def loaded(self) -> LoadedTokenizer:
        """Return the base's tokenizer in the form that is served."""
        return load_tokenizer(self._model_dir)

    @property
    def tokenizer(self) -> Any:
        """Return transformers' tokenizer of the base."""
        return self.loaded.tokenizer

    @cached_property
    def backend(self) -> Any:
        """Return the tokenizer of the tokenizers library, or None if the base has none."""
        return getattr(self.tokenizer, "backend_tokenizer", None)

    @cached_property
    def sections(self) -> list[dict[str, Any]]:
        """Return the base's sections in two forms: those of its tokenizer.json, and those that transformers makes when
        it loads the file.
        """
        texts = [made.to_str() for made in (self.backend, self.loaded.rebuilt) if made is not None]
        if (saved := self._model_dir / TOKENIZER_FILE).is_file():
            texts.append(_normalised(saved.read_text()))
        return [{name: document.get(name) for name in _SECTIONS} for document in map(json.loads, texts)]

    @cached_property
    def is_encoder(self) -> bool:
        """Return whether the base reads a text in both directions."""
        return is_encoder(self._model_dir)

    @property
    def template(self) -> str:
        """Return the base's chat template; empty if the base has none."""
        template = self.tokenizer.chat_template
        return template if isinstance(template, str) else ""

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Return the template's variables."""
        return {name: str(token) for name, token in self.tokenizer.special_tokens_map.items() if name in _SPECIAL}


def examine(job: BundleJob, base: BaseText) -> ValidationReport:
    """Write the folder's bundle and return a report. A refusal is part of the report."""
    folder = Path(job.folder)
    try:
        bundle = _with_task(make_bundle(folder, base, job.num_tokens), folder, job, is_encoder=base.is_encoder)
        notes = _longest(folder)
    except BundleRejected as rejected:
        failed = Check(name=BUNDLE_CHECK, outcome="failed", detail=rejected.rejection.message)
        return ValidationReport(checks=(failed,), refusal=rejected.rejection)
    if bundle != NO_BUNDLE:
        (folder / BUNDLE_FILE).write_bytes(encode_bundle(bundle))
    return ValidationReport(checks=(Check(name=BUNDLE_CHECK, outcome="passed"),), warnings=notes)


def make_bundle(folder: Path, base: BaseText, num_tokens: int) -> Bundle:
    """Return the bundle of the files in `folder`, without the parts that equal the base's.

    `num_tokens` are the rows of the embedding and the head. Raises BundleRejected.
    """
    settings = _of_settings(folder)
    generation = _of_generation(folder)
    greedy = {"temperature": 0.0} if generation.do_sample is False else {}
    recommended = {name: getattr(generation, name) for name in RECOMMENDED} | greedy
    config = read_object(folder, TOKENIZER_CONFIG_FILE)
    added = _added_tokens(folder, config, base, num_tokens)
    special = _special_tokens(config, base)
    own = _template(folder, config)
    if own is None or own == base.template:
        # The base's own template needs no limited process, unless it would use other special tokens.
        own = base.template if any(name in base.template for name in special) else None
    bundle = Bundle(
        chat_template=own,
        special_tokens={} if own is None else base.special_tokens | special,
        added_tokens=added,
        eos_token_ids=_eos_token_ids(generation, special, added, base, num_tokens),
        sampling=SamplingDefaults(**recommended),
        max_tokens=generation.max_new_tokens,
        stop=settings.stop or _listed(generation.stop_strings),
        system_prompt=settings.system_prompt,
        tool_parser=settings.tool_parser,
        description=settings.description,
        license=settings.license,
    )
    return _checked(bundle)


def _with_task(bundle: Bundle, folder: Path, job: BundleJob, *, is_encoder: bool) -> Bundle:
    """Return the bundle with the fields of the task for which the adapter was trained. Raises BundleRejected."""
    settings = _of_settings(folder)
    fields = {
        "SEQ_CLS": ("labels", "problem_type"),
        "TOKEN_CLS": ("labels",),
        "FEATURE_EXTRACTION": ("pooling", "matryoshka_dimensions"),
        "CAUSAL_LM": ("pooling", "matryoshka_dimensions"),
    }[job.task]
    for field in ("labels", "problem_type", "pooling", "matryoshka_dimensions"):
        if getattr(settings, field) and field not in fields:
            raise BundleRejected(SETTINGS_FILE, f"{field} means nothing for an adapter of task type {job.task}.")
    if job.task not in ("SEQ_CLS", "TOKEN_CLS"):
        if settings.pooling == "cls" and not is_encoder:
            raise BundleRejected(SETTINGS_FILE, FIRST_TOKEN, "field_unsupported")
        refuse_dense(folder, _DENSE_OF_BASE)
        pooling = settings.pooling or sentence_pooling(folder, is_encoder=is_encoder)
        task = "FEATURE_EXTRACTION" if job.task == "FEATURE_EXTRACTION" else None
        dimensions = tuple(sorted(set(settings.matryoshka_dimensions)))
        return _checked(msgspec.structs.replace(bundle, task=task, pooling=pooling, matryoshka_dimensions=dimensions))
    config = of_model(folder)
    labels, problem = settings.labels or labels_of(config), settings.problem_type or config.problem_type
    problem = problem if job.task == "SEQ_CLS" else None  # transformers trains classes of tokens in one way
    if labels and len(labels) != job.num_labels:
        file = SETTINGS_FILE if settings.labels else MODEL_FILE
        raise BundleRejected(file, f"It names {len(labels)} labels, and the adapter's head has {job.num_labels}.")
    return _checked(
        msgspec.structs.replace(bundle, task=job.task, num_labels=job.num_labels, labels=labels, problem_type=problem)
    )


def _longest(folder: Path) -> tuple[ReportWarning, ...]:
    """Return a note if texts were shortened in training, because this server does not shorten them."""
    length = read_object(folder, LENGTH_FILE).get("max_seq_length")
    if length is None:
        return ()
    message = (
        f"max_seq_length is {str(length)[:20]}, and longer texts are not cut by themselves: send "
        "'truncate_prompt_tokens' with them, and 'truncation_side': 'right'."
    )
    return (ReportWarning(code="texts_not_cut", field=LENGTH_FILE, message=message),)


def _checked(bundle: Bundle) -> Bundle:
    """Check every bound of the stored form. Raises BundleRejected."""
    try:
        data = encode_bundle(bundle)
        checked = msgspec.json.decode(data, type=Bundle)
    except msgspec.ValidationError as error:
        field = str(error).partition("`$.")[2].partition("`")[0].partition("[")[0]
        generation = field.startswith(("sampling", "max_tokens", "eos"))
        file = GENERATION_FILE if generation else TEMPLATE_FILE if field == "chat_template" else SETTINGS_FILE
        raise BundleRejected(file, f"{error}.") from None
    if len(data) > MAX_BUNDLE_BYTES:
        raise BundleRejected(BUNDLE_FILE, f"Together the files make {len(data)} bytes; at most {MAX_BUNDLE_BYTES}.")
    return checked


def _of_settings(folder: Path) -> _Settings:
    if (text := read_text(folder, SETTINGS_FILE)) is None:
        return _Settings()
    try:
        return msgspec.convert(tomllib.loads(text), _Settings)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise BundleRejected(SETTINGS_FILE, f"This is not TOML: {error}.") from None
    except msgspec.ValidationError as error:
        known = ", ".join(_Settings.__struct_fields__)
        raise BundleRejected(SETTINGS_FILE, f"{error}. The fields are {known}.") from None


def _of_generation(folder: Path) -> _Generation:
    document = read_object(folder, GENERATION_FILE)
    for field, value in document.items():
        if field in _GENERATION_READ or field in _GENERATION_HARMLESS:
            continue
        if value and value != _GENERATION_NEUTRAL.get(field):
            raise BundleRejected(
                GENERATION_FILE,
                f"{field[:80]!r} is set to {str(value)[:80]}, which this server cannot do. Served are "
                f"{', '.join(sorted(_GENERATION_READ))}. Remove the field, or set it to its neutral value.",
                "field_unsupported",
            )
    read = {field: value for field, value in document.items() if field in _GENERATION_READ}
    try:
        return msgspec.convert(read, _Generation)
    except msgspec.ValidationError as error:
        raise BundleRejected(GENERATION_FILE, f"{error}.") from None


def _listed(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value or ()


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the chat template from chat_template.jinja or, without this file, from tokenizer_config.json, as in
    transformers.
    """
    template = read_text(folder, TEMPLATE_FILE)
    if template is None and (template := config.get("chat_template")) is None:
        return None
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        if set(named) != {"default"}:
            raise BundleRejected(
                TOKENIZER_CONFIG_FILE,
                f"chat_template has the templates {', '.join(map(str, named))[:200]}; one alone is served, `default`. "
                "Keep that one, or save one template as chat_template.jinja.",
                "field_unsupported",
            )
        template = named["default"]
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARACTERS:
        where = TEMPLATE_FILE if (folder / TEMPLATE_FILE).exists() else TOKENIZER_CONFIG_FILE
        raise BundleRejected(where, f"A chat template is a text of at most {MAX_TEMPLATE_CHARACTERS} characters.")
    return template


def _special_tokens(config: Mapping[str, Any], base: BaseText) -> dict[str, str]:
    found = {}
    for name in _SPECIAL:
        value = config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if token is None or token == base.special_tokens.get(name):
            continue
        if not isinstance(token, str) or len(token) > 512:
            raise BundleRejected(TOKENIZER_CONFIG_FILE, f"{name} is not a token: {str(value)[:80]!r}.")
        found[name] = token
    return found


def _added_tokens(folder: Path, config: Mapping[str, Any], base: BaseText, num_tokens: int) -> tuple[AddedToken, ...]:
    """Return the tokens that the base lacks or has with other attributes, by id."""
    file, listed = TOKENIZER_FILE, _of_tokenizer(folder, base)
    if listed is None:
        file, listed = TOKENIZER_CONFIG_FILE, _of_decoder(config)
    _check_old_tokens(folder, {token.content for token in listed}, base)
    text = read_text(folder, TOKENIZER_FILE)
    if not listed:
        if text is not None and base.backend is not None:
            _check_served(base.backend, text)
        return ()
    if base.backend is None:
        raise BundleRejected(file, "This base's tokenizer is none of the tokenizers library; it takes no added tokens.")
    known = base.backend.get_added_tokens_decoder()
    added = tuple(token for token in sorted(listed, key=lambda one: one.id) if not _equals(token, known.get(token.id)))
    for token in added:
        if token.id >= num_tokens:
            raise BundleRejected(
                file,
                f"The token {token.content[:80]!r} has the id {token.id}, and the adapter has rows for {num_tokens} "
                "tokens. Resize the embedding to the tokenizer before training, and save the new rows: "
                "modules_to_save=['embed_tokens', 'lm_head'], or trainable_token_indices.",
                "tokens_without_rows",
            )
    if len(added) > MAX_ADDED_TOKENS:
        raise BundleRejected(file, f"{len(added)} tokens are not the base's; at most {MAX_ADDED_TOKENS} are served.")
    try:
        served = extend_tokenizer(base.backend, added)
    except ValueError as error:
        raise BundleRejected(file, f"The tokens do not continue the base's: {error}.") from None
    if text is not None:
        _check_served(served, text)
    return added


def _check_served(served: Any, text: str) -> None:
    """Refuse a tokenizer.json that gives other tokens for a text than the served tokenizer."""
    if (difference := tokenizer_difference(served, read_tokenizer(text))) is not None:
        raise BundleRejected(
            TOKENIZER_FILE,
            f"It is not the tokenizer that would be served, the base's with the added tokens: {difference}. The "
            "adapter was trained with other tokens than it would be asked with.",
            "tokenizer_differs",
        )


def _check_old_tokens(folder: Path, listed: Set[str], base: BaseText) -> None:
    """Refuse tokens that only added_tokens.json names, because this file does not define how they are recognised in a
    text.
    """
    known = base.tokenizer.get_vocab()
    for token in read_object(folder, OLD_TOKENS_FILE):
        if token not in known and token not in listed:
            raise BundleRejected(
                OLD_TOKENS_FILE,
                f"It adds {token[:80]!r}, which neither tokenizer.json nor tokenizer_config.json describes. Save the "
                "tokenizer again with a fast tokenizer (AutoTokenizer), and upload its tokenizer.json.",
            )


def _equals(token: AddedToken, other: Any) -> bool:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return other is not None and all(getattr(token, name) == getattr(other, name) for name in names)


def _of_tokenizer(folder: Path, base: BaseText) -> list[AddedToken] | None:
    """Return the added tokens of tokenizer.json, whose other parts must all equal the base's; None without the file."""
    if (text := read_text(folder, TOKENIZER_FILE)) is None:
        return None
    try:
        document = json.loads(_normalised(text))
        added = msgspec.convert(document["added_tokens"], list[AddedToken])
    except Exception as error:  # the library raises its root class
        raise BundleRejected(TOKENIZER_FILE, f"The tokenizers library cannot read it: {str(error)[:200]}.") from None
    for section in _SECTIONS:
        if all(document.get(section) != known[section] for known in base.sections):
            raise BundleRejected(
                TOKENIZER_FILE,
                f"Its {section} is not this base's: the adapter was trained with another tokenizer. Served is the "
                "base's tokenizer with added tokens.",
                "tokenizer_differs",
            )
    return added


def _of_decoder(config: Mapping[str, Any]) -> list[AddedToken]:
    """Return the added tokens of tokenizer_config.json."""
    decoder = config.get("added_tokens_decoder") or {}
    try:
        return [msgspec.convert({**token, "id": int(id)}, AddedToken) for id, token in decoder.items()]
    except (TypeError, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise BundleRejected(TOKENIZER_CONFIG_FILE, f"added_tokens_decoder: {str(error)[:200]}.") from None


def _eos_token_ids(
    generation: _Generation, special: Mapping[str, str], added: tuple[AddedToken, ...], base: BaseText, num_tokens: int
) -> tuple[int, ...]:
    """Return the ids that end an answer: the ids of generation_config, and the eos_token if it is not the base's."""
    given = generation.eos_token_id
    ids = set((given,) if isinstance(given, int) else given or ())
    if (eos := special.get("eos_token")) is not None:
        own = next((token.id for token in added if token.content == eos), None)
        id = base.tokenizer.convert_tokens_to_ids(eos) if own is None else own
        if not isinstance(id, int) or (base.tokenizer.convert_ids_to_tokens(id) != eos and own is None):
            _refuse_eos(TOKENIZER_CONFIG_FILE, f"{eos[:80]!r}, which is no token of its tokenizer")
        ids.add(id)
    if ids and not 0 <= min(ids) <= max(ids) < num_tokens:
        _refuse_eos(GENERATION_FILE, f"{max(ids)}; the tokens are 0 to {num_tokens - 1}")
    return tuple(sorted(ids))


def _refuse_eos(file: str, what: str) -> NoReturn:
    raise BundleRejected(file, f"The token that ends an answer is {what}.")


def _normalised(text: str) -> str:
    """Return a tokenizer.json as this version of the library writes it."""
    import tokenizers

    return str(tokenizers.Tokenizer.from_str(text).to_str())

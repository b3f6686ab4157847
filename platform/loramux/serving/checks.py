"""Checks of a request before it is admitted: context, vocabulary, sizes of the answer, tags, storage, and the task.

A revision answers the requests that it was trained for (PEFT's task types):

    trained for                    chat, completions   embeddings   classify   score, rerank
    text (CAUSAL_LM), the base     yes                 yes          -          cosine of two vectors
    an encoder as a base           -                   yes          -          cosine of two vectors
    an encoder with its own head   -                   -            yes        with one label: of both texts together
    vectors (FEATURE_EXTRACTION)   -                   yes          -          cosine of two vectors
    classes (SEQ_CLS)              -                   -            yes        with one label: of both texts together
    classes of tokens (TOKEN_CLS)  -                   -            yes        -

Any other request is refused, because a head that was not trained gives meaningless numbers. The error names the
endpoint that would answer the request.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import msgspec

from loramux.common.bundle import Bundle
from loramux.common.identity import Principal
from loramux.data.entities import ServiceTier
from loramux.data.records.requests import SHADOW
from loramux.engine.messages import Constraint, ModelFacts, Pooling, ServiceClass
from loramux.serving.errors import InvalidRequest, NotAllowed, PromptTooLong
from loramux.serving.messages import GenerationRequest, Prompt, TextPair

MAX_TAGS = 16
MAX_TAG_KEY = 64
MAX_TAG_VALUE = 512
"""Longest tag value, in characters: the bound of OpenAI's `metadata`."""
MAX_CUT_CHARACTERS = 1 << 20
"""Characters of a text that a truncation cuts, in any context: all of them are tokenized."""
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for text completions."""
MAX_LOGPROBS = 4_000_000
"""Maximum number of log probabilities in an answer, over all choices; each takes about 65 bytes."""
MAX_PROMPT_LOGPROBS = 200_000
"""Maximum number of log probabilities of prompts in an answer; they are sent in one piece."""
MAX_REPEATED_BYTES = 16 << 20
"""Maximum bytes of the prompts that an answer repeats in its choices."""
BYTES_PER_TOKEN_ID = 7
"""Bytes of a token id in a list."""
MAX_KEPT_LOGPROBS = 400_000
"""Maximum number of log probabilities in an answer that is kept for an idempotency key."""
MAX_DEPTH = 100
"""Maximum number of levels of nested lists and objects in the values that a template gets, because their readers are
recursive.
"""
MAX_NUMBERS = 2_000_000
"""Maximum number of numbers in the vectors of an answer; each takes up to 22 bytes."""
MAX_KEPT_NUMBERS = 1_000_000
"""Maximum number of numbers in the vectors of an answer that is kept for an idempotency key, 4 bytes each."""
NUMBERS_PER_TOKEN = 5
"""Size of a classified token's text, place and label in an answer, as numbers."""
UNSUPPORTED_TASK = "unsupported_task"
CLASSIFIERS: Mapping[str | None, Pooling] = {"SEQ_CLS": "classify", "TOKEN_CLS": "token_classify"}
"""Poolings of classifiers, by task."""
_CONTAINERS = (dict, list, tuple)
"""Types of the lists and objects in a decoded body. `Mapping` takes eight times as long, and a body has up to
50,000 of them.
"""
_encode = msgspec.json.Encoder(order="sorted").encode


def check_depth(asked: GenerationRequest) -> None:
    """Refuse tools, arguments of calls and template variables that are nested too deeply. Raises InvalidRequest."""
    messages = [one.fields for prompt in asked.prompts if isinstance(prompt, tuple) for one in prompt]
    given = [("messages", messages), *asked.chat.template.items()]
    for name, value in given:
        level = [value] if isinstance(value, _CONTAINERS) else []
        for _ in range(MAX_DEPTH + 1):
            items = (one.values() if isinstance(one, dict) else one for one in level)
            level = [item for inner in items for item in inner if isinstance(item, _CONTAINERS)]
            if not level:
                break
        else:
            field = name if name in ("messages", "tools") else "chat_template_kwargs"
            raise InvalidRequest(
                f"'{field}' is nested more than {MAX_DEPTH} levels deep; send something flatter.", field=field
            )


def as_answered_by(asked: GenerationRequest, bundle: Bundle, base: ModelFacts) -> GenerationRequest:
    """Return the request in the form that a model with this bundle, on `base`, answers. Raises InvalidRequest."""
    if asked.pairs and bundle.task == "SEQ_CLS":
        return _pairs_for_classifier(asked, bundle)
    own = CLASSIFIERS.get(bundle.task)
    wanted = asked.pooling
    if wanted == "trained":
        wanted = "own" if own is None else "classes"
    if own is not None and wanted in ("classes", own):
        return replace(asked, pooling=own)
    if own is None and wanted in ("classes", *CLASSIFIERS.values()):
        raise _unsupported_task(
            "is no classifier (task type SEQ_CLS or TOKEN_CLS). Call /v1/embeddings, or name an adapter that is one."
        )
    if own == "classify":
        raise _unsupported_task(
            "was trained for classes (task type SEQ_CLS). Call /v1/classify, or /v1/score and /v1/rerank where it has "
            "one label; or name another model."
        )
    if own is not None:
        raise _unsupported_task(
            "was trained for the classes of tokens (task type TOKEN_CLS). Call /v1/classify, or name another model."
        )
    if wanted is None and bundle.task == "FEATURE_EXTRACTION":
        raise _unsupported_task(
            "was trained for vectors (task type FEATURE_EXTRACTION). Call /v1/embeddings, /v1/score or /v1/rerank; or "
            "name another model."
        )
    if wanted == "cls" and base.generates:
        raise InvalidRequest(
            "'pooling' is 'cls', and this model reads from left to right: its first state has seen one token. Send "
            "'last' or 'mean'.",
            field="pooling",
            code="unsupported_parameter",
        )
    _check_dimensions(asked.dimensions, bundle, base.hidden_size)
    return replace(asked, pooling=bundle.pooling or "last") if wanted == "own" else asked


def _pairs_for_classifier(asked: GenerationRequest, bundle: Bundle) -> GenerationRequest:
    if bundle.num_labels != 1:
        raise _unsupported_task(
            f"is a classifier with {bundle.num_labels} labels, and texts are scored by one. Call /v1/classify, or "
            "train it with num_labels=1."
        )
    return replace(asked, prompts=asked.pairs, pairs=(), pooling="classify")


def _check_dimensions(dimensions: int | None, bundle: Bundle, width: int) -> None:
    if dimensions in (None, width, *bundle.matryoshka_dimensions):
        return
    known = ", ".join(map(str, (*bundle.matryoshka_dimensions, width)))
    raise InvalidRequest(
        f"'dimensions' is {dimensions}, and this model's vectors have {known} numbers: leave it out. Of an adapter "
        "that was trained for shorter ones, loramux.toml lists them (matryoshka_dimensions).",
        field="dimensions",
        code="unsupported_parameter",
    )


def _unsupported_task(why: str) -> InvalidRequest:
    return InvalidRequest(f"This 'model' {why}", field="model", code=UNSUPPORTED_TASK)


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise InvalidRequest for a token id that the model does not have."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"'{field}' names token {token_id}, which is out of vocabulary: this model has {vocab_size} tokens, "
                f"0 to {vocab_size - 1}.",
                field=field,
            )


def check_text_length(prompt: Prompt, longest_token: int, context: int) -> None:
    """Refuse a text that is too long for the context in any tokenization, before the time to tokenize it is spent.

    `longest_token` is in characters. Raises InvalidRequest.
    """
    if (length := _length(prompt)) > longest_token * context:
        why = f"your prompt has {length} characters and no token has more than {longest_token}. Please shorten it."
        raise _too_long(prompt, context, why, -(-length // longest_token))


def check_cut_length(prompt: Prompt, longest_token: int, context: int) -> int:
    """Return the maximum number of characters of a text that a truncation cuts. Raises InvalidRequest for a longer
    text.
    """
    most = max(MAX_CUT_CHARACTERS, longest_token * context)
    if (length := _length(prompt)) > most:
        why = f"your prompt has {length} characters, and at most {most} are cut. Please shorten it."
        raise _too_long(prompt, context, why, -(-length // longest_token))
    return most


def _length(prompt: Prompt) -> int:
    """Return the number of characters of a prompt of text; 0 for token ids."""
    if isinstance(prompt, list):
        return 0
    return len(prompt) if isinstance(prompt, str | TextPair) else sum(len(m.content) + m.size for m in prompt)


def resolve_max_tokens(
    asked: GenerationRequest, prompt: Prompt, num_prompt_tokens: int, context: int, of_revision: int | None = None
) -> int:
    """Return the number of tokens that a choice may generate after `prompt`. `of_revision` is the revision's own
    default.

    After a conversation, a `max_tokens` beyond the context is lowered: it is an upper bound, and agents set it to the
    whole context. After a text the same request is refused, as OpenAI's completions refuse it.

    Raises InvalidRequest (code context_length_exceeded) if the prompt, or a text and its answer, do not fit in
    `context` tokens.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"'{_field(prompt)}' holds no token; send at least one.", field=_field(prompt))
    left = context - num_prompt_tokens
    if asked.pooling is not None and left >= 0:
        return 1  # the engine needs at least 1, and generates nothing here
    if left < 1:
        raise _too_long(
            prompt, context, f"your prompt has {num_prompt_tokens} tokens. Please shorten it.", num_prompt_tokens
        )
    is_conversation = isinstance(prompt, tuple)
    if asked.max_tokens is not None and asked.max_tokens > left and not is_conversation:
        raise _too_long(
            prompt,
            context,
            f"you requested {num_prompt_tokens + asked.max_tokens} tokens ({num_prompt_tokens} in the prompt, "
            f"{asked.max_tokens} for the completion). Please shorten the prompt or lower 'max_tokens'.",
            num_prompt_tokens,
        )
    if asked.max_tokens == 0:
        return 1  # the engine generates one token, which is not shown
    default = min(of_revision or (left if is_conversation else DEFAULT_MAX_TOKENS), left)
    max_tokens = min(asked.max_tokens or default, left)
    if asked.sampling.min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' is {asked.sampling.min_tokens}, more than the {max_tokens} tokens that may be generated; "
            "lower it or raise 'max_tokens'.",
            field="min_tokens",
        )
    return max_tokens


def _too_long(prompt: Prompt, context: int, why: str, tokens: int) -> PromptTooLong:
    message = f"This model's maximum context length is {context} tokens. However, {why}"
    return PromptTooLong(message, _field(prompt), tokens=tokens, most=context - 1)


def _field(prompt: Prompt) -> str:
    return "messages" if isinstance(prompt, tuple) else "prompt"


def check_allowed_tokens(asked: GenerationRequest, constraint: Constraint | None) -> None:
    """Refuse `allowed_token_ids` together with a format: because together they may exclude every token. Raises
    InvalidRequest.
    """
    if constraint is not None and asked.sampling.allowed_token_ids:
        raise InvalidRequest(
            f"'allowed_token_ids' is not available together with '{constraint.field}', whose format decides which "
            "tokens are allowed; leave one of them out.",
            field="allowed_token_ids",
        )


def check_numbers(asked: GenerationRequest, lengths: Sequence[int], bundle: Bundle, width: int) -> None:
    """Raise InvalidRequest if the vectors, or the classes of tokens, are more than a server can hold for one answer.

    `lengths` are the tokens of each prompt, `width` is the size of a vector.
    """
    if asked.pooling is None:
        return
    limit = MAX_NUMBERS if asked.claim is None else MAX_KEPT_NUMBERS
    kept = "" if asked.claim is None else " with an Idempotency-Key"
    if asked.pooling == "token_classify":
        count, size, parts = sum(lengths), bundle.num_labels + NUMBERS_PER_TOKEN, "tokens"
        each = f"each with {bundle.num_labels} labels, which take as much as {size} numbers"
    else:
        count, size, parts = len(lengths), bundle.num_labels if asked.pooling == "classify" else width, "inputs"
        each = f"each with a vector of {size} numbers"
    if count * size > limit:
        raise InvalidRequest(
            f"This request has {count} {parts}, {each}, and the most{kept} is {limit} numbers, {limit // size} "
            f"{parts}. Send several requests.",
            field="prompt",
        )


def check_logprobs(asked: GenerationRequest, max_tokens: int) -> None:
    """Raise InvalidRequest if an answer of `max_tokens` has more log probabilities than the server can hold."""
    if asked.sampling.logprobs is None:
        return
    alternatives = max(asked.sampling.logprobs, len(asked.sampling.logprob_token_ids))
    count = max_tokens * (1 + alternatives)
    limit = MAX_LOGPROBS if asked.claim is None else MAX_KEPT_LOGPROBS
    if count > limit:
        kept = "" if asked.claim is None else " with an Idempotency-Key"
        raise InvalidRequest(
            f"This request may return {count} log probabilities ({max_tokens} tokens of all choices, "
            f"{alternatives} alternatives each), and the most{kept} is {limit}. Lower 'max_tokens', 'n' or "
            "the number of log probabilities.",
            field="logprobs",
        )


def check_prompt_logprobs(asked: GenerationRequest, num_tokens: int) -> None:
    """Raise InvalidRequest if prompts of `num_tokens` have more log probabilities than one answer may hold. Each of `n`
    choices repeats them.
    """
    if asked.sampling.prompt_logprobs is None:
        return
    count = num_tokens * (1 + asked.sampling.prompt_logprobs) * asked.n
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"This request asks for {count} log probabilities of its prompts ({num_tokens} tokens, "
            f"{asked.sampling.prompt_logprobs} alternatives each, in {asked.n} choices), and the most is "
            f"{MAX_PROMPT_LOGPROBS}. Send shorter prompts, or ask for fewer alternatives or choices.",
            field="prompt_logprobs",
        )


def count_repeated_bytes(asked: GenerationRequest, num_tokens: int, num_characters: int) -> int:
    """Return the bytes of the prompts that an answer repeats in its choices: token ids of prompts of `num_tokens`, and
    echoed texts of `num_characters`. Raises InvalidRequest if they are more than one answer may hold.
    """
    count = (BYTES_PER_TOKEN_ID * num_tokens * asked.repeats_token_ids + num_characters) * asked.n
    if count > MAX_REPEATED_BYTES:
        field = "echo" if num_characters else "return_token_ids"
        raise InvalidRequest(
            f"This request repeats its prompts in {asked.n} choices, which takes {count} bytes, and the most is "
            f"{MAX_REPEATED_BYTES}. Lower 'n', send shorter prompts, or leave '{field}' out.",
            field=field,
        )
    return count


def service_class_of(principal: Principal, service_tier: ServiceTier) -> ServiceClass:
    """Return the scheduler's class of a request. Raises NotAllowed where the tenant's tier lacks the service tier."""
    if service_tier == "default":
        return ServiceClass(principal.service_class)
    if service_tier == SHADOW:
        return ServiceClass.BATCH
    if service_tier not in principal.service_tiers:
        allowed = ", ".join(["auto", "default", *sorted(principal.service_tiers - {"batch"})])
        raise NotAllowed(
            f"Your plan has no service tier '{service_tier}'; it has {allowed}. Leave 'service_tier' out, or ask your "
            "operator for it.",
            "service_tier",
            code="service_tier_not_allowed",
        )
    return ServiceClass.INTERACTIVE if service_tier == "priority" else ServiceClass.BATCH


def ensure_storage_allowed(principal: Principal, field: str) -> None:
    """Raise NotAllowed if the caller's tenant has zero retention, so that its texts may not be stored."""
    if principal.zero_retention:
        raise storage_refused(field)


def storage_refused(field: str) -> NotAllowed:
    """Return the error for a tenant with zero retention that asks to store something."""
    return NotAllowed(
        "Your organization has zero retention: nothing that its requests say or get is stored, so it has no "
        "Idempotency-Key, no stored responses, no files but training files, no batches and no outputs of shadows. "
        "Leave it out, or ask your operator.",
        field,
        code="zero_retention",
    )


def recorded_user(principal: Principal, user: str | None) -> str | None:
    """Return the end user for the bill; None if no data of the caller may be stored. Raises InvalidRequest."""
    if user is not None and not user.isprintable():
        raise InvalidRequest("Invalid value for 'user': all its characters must be printable.", field="user")
    return None if principal.zero_retention else user


def canonical_tags(tags: Mapping[str, str] | None) -> str:
    """Return the tags as a JSON object with sorted keys; empty without tags. Raises InvalidRequest."""
    if not tags:
        return ""
    if len(tags) > MAX_TAGS:
        raise _invalid_tags(f"a request has at most {MAX_TAGS} and this one has {len(tags)}; send fewer.")
    for key, value in tags.items():
        if not (1 <= len(key) <= MAX_TAG_KEY and key.isprintable()):
            raise _invalid_tags(f"a name has 1 to {MAX_TAG_KEY} printable characters; got {key[:MAX_TAG_KEY]!r}.")
        if not (len(value) <= MAX_TAG_VALUE and value.isprintable()):
            raise _invalid_tags(f"the value of {key!r} has at most {MAX_TAG_VALUE} characters, all printable.")
    return _encode(dict(tags)).decode()


def _invalid_tags(why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for 'metadata': {why}", field="metadata", code="invalid_value")

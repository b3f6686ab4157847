"""Fields of an inference body that the endpoint does not know: ignored, or refused if ignoring them would deceive the
caller.

In every request, clients send fields of other servers, and fields that are newer than any server. Such a field is
ignored and reported (`x-loramux-ignored-fields`). Two kinds of fields are refused: a near-misspelling of a field that
the endpoint knows, and a field that changes answers on the servers that support it (`MEANINGFUL`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from loramux.common.sampling import KINDS, PARAMETERS
from loramux.common.sampling import NEUTRAL as _NEUTRAL
from loramux.serving.errors import InvalidRequest

MAX_UNKNOWN = 64
"""Maximum number of unknown fields of one body."""
LONGEST_NAME = 64
"""Longest name that may be a misspelling, and longest part of any name that is reported, in characters."""
LIKENESS = 0.85
"""Share of common characters from which a name counts as a misspelling: one letter of 6, two of 13."""
_separators = re.compile(r"[^a-z0-9]+")

_ANSWER_LENGTH = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MEANINGFUL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_ANSWER_LENGTH, "max_new_tokens", "num_predict", "n_predict", "max_length"), _ANSWER_LENGTH),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "system": ("messages", "instructions"),
    "instructions": ("system", "messages"),
    "messages": ("input", "prompt"),
    "input": ("messages", "prompt"),
    "prompt": ("messages", "input"),
    "suffix": (),
    "images": (),
    "response_format": ("text", "output_config"),
    "structured_outputs": ("text", "output_config", "response_format"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ("structured_outputs", "text")),
    **dict.fromkeys(("json_schema", "format"), ("response_format", "text", "output_config")),
    **dict.fromkeys(("regex", "grammar", "ebnf"), ("structured_outputs", "text", "output_config")),
    **dict.fromkeys(PARAMETERS, ()),
    **dict.fromkeys(("n", "logprobs", "top_logprobs", "echo", "best_of", "use_beam_search", "seed"), ()),
    **dict.fromkeys(("min_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("do_sample", "num_beams", "typical_p", "top_a", "tfs_z", "top_n_sigma", "mirostat"), ()),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "dynatemp_range", "smoothing_factor"), ()),
    **dict.fromkeys(("guidance_scale", "negative_prompt", "no_repeat_ngram_size", "penalty_alpha"), ()),
    **dict.fromkeys(("custom_logit_processor", "watermark", "no_stop_trim"), ()),
    **dict.fromkeys(("lora_path", "lora", "lora_name", "lora_request", "adapter_id", "adapter_name"), ("model",)),
    "random_seed": ("seed",),
    "repeat_penalty": ("repetition_penalty",),
    "stop_regex": ("stop", "stop_sequences"),
    "input_ids": ("prompt", "messages", "input"),
    "prompt_truncate_len": ("truncate_prompt_tokens",),
    "echo_last": ("echo",),
    "reasoning_format": ("include_reasoning",),
    **dict.fromkeys(("tool_prompt", "safe_prompt"), ("messages", "system", "instructions")),
    **dict.fromkeys(("safety_model", "guardrails"), ()),
    **dict.fromkeys(("output_dimension", "output_dimensionality"), ("dimensions",)),
    **dict.fromkeys(("functions", "function_call"), ("tools", "tool_choice")),
    **dict.fromkeys(("previous_response_id", "conversation"), ("messages", "input")),
}
"""Fields that change the answer at endpoints or servers that have them, and the fields with the same meaning in other
endpoints.
"""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **{name: (getattr(_NEUTRAL, name), *PARAMETERS[name].other_neutrals) for name in KINDS if name != "temperature"},
    **dict.fromkeys(("n", "best_of", "num_beams", "typical_p", "tfs_z", "repeat_penalty"), (1,)),
    **dict.fromkeys(("min_tokens", "top_a", "mirostat", "echo_last"), (0,)),
    **dict.fromkeys(("xtc_probability", "dry_multiplier", "dynatemp_range", "smoothing_factor"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "penalty_alpha"), (0,)),
    "do_sample": (True,),
    "guidance_scale": (1,),
    "reasoning_format": ("parsed", "auto", "deepseek"),
}
"""Values that ask for the default behaviour, in addition to null, false and empty values."""


def ensure_ignorable(path: str, name: str, value: Any, known: Collection[str]) -> None:
    """Raise InvalidRequest for a field that must not be ignored. `known` has the fields of the object."""
    shown = f"{path}{name[:LONGEST_NAME]}"
    if _asks_for_nothing(name, value):
        return
    if not path and name in MEANINGFUL:
        instead = [one for one in MEANINGFUL[name] if one in known]
        hint = f"send '{instead[0]}'" if instead else "leave it out"
        raise InvalidRequest(
            f"Unrecognized request argument supplied: {shown}. It would change the answer, and this endpoint has no "
            f"such field; {hint}.",
            field=shown,
            code="unknown_parameter",
        )
    if name not in MEANINGFUL and (meant := misspelling_of(name, known)) is not None:
        raise InvalidRequest(
            f"Unrecognized request argument supplied: {shown}. Did you mean '{path}{meant}'?",
            field=shown,
            code="unknown_parameter",
        )


def _asks_for_nothing(name: str, value: Any) -> bool:
    if value is None or value is False or (isinstance(value, str | list | dict) and not value):
        return True
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL.get(name, ()))


def too_many(count: int) -> InvalidRequest:
    """Return the error for a body with `count` unknown fields."""
    message = f"The body has {count} fields that this endpoint does not know, and the most is {MAX_UNKNOWN}."
    return InvalidRequest(f"{message} Send fewer.", code="unknown_parameter")


def misspelling_of(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` misspells, if there is one."""
    if len(name) > LONGEST_NAME:
        return None
    by_letters = {_letters(one): one for one in known}
    close = difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=LIKENESS)
    return by_letters[close[0]] if close else None


def _letters(name: str) -> str:
    """Return a name in a common spelling: `maxTokens`, `max-tokens` and `max_tokens` are the same."""
    return _separators.sub("", name.lower())

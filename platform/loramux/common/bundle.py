"""The bundle of a revision: the files that an adapter brings in addition to its weights, as one file.

Trainers save a chat template, a tokenizer and generation defaults next to an adapter's weights, and its owner may add a
`loramux.toml`. At upload these files become one file, `bundle.json`, which holds only the settings that serving uses.
The bundle is stored and digested with the weights. So a revision always gets the prompt format that it was trained
with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loramux.common.sampling import RECOMMENDED, with_numbers

VectorPooling = Literal["last", "mean", "cls"]
"""Reductions of a text's hidden states to its vector: the last state, the mean of all, and for encoders the first."""
BUNDLE_FILE = "bundle.json"
"""Name of the bundle's file in a stored content. A content without this file has no bundle."""
MAX_BUNDLE_BYTES = 4 << 20
MAX_ADDED_TOKENS = 4096
MAX_STOPS = 16
MAX_LABELS = 4096
MAX_NAMED = 5
"""The largest number of folders that a message names."""
MAX_TEMPLATE_CHARACTERS = 128 << 10

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
OLD_TOKENS_FILE = "added_tokens.json"
GENERATION_FILE = "generation_config.json"
SETTINGS_FILE = "loramux.toml"
MODEL_FILE = "config.json"
POOLING_FILE = "1_Pooling/config.json"
MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILE = "sentence_bert_config.json"
"""The last four files are sentence-transformers'."""

SOURCES: Mapping[str, int] = {
    TEMPLATE_FILE: 1 << 20,
    TOKENIZER_FILE: 48 << 20,
    TOKENIZER_CONFIG_FILE: 4 << 20,
    OLD_TOKENS_FILE: 1 << 20,
    GENERATION_FILE: 256 << 10,
    SETTINGS_FILE: 256 << 10,
    POOLING_FILE: 64 << 10,  # before the other config.json, because a form may name this file only by its field
    MODEL_FILE: 1 << 20,
    MODULES_FILE: 64 << 10,
    PROMPTS_FILE: 256 << 10,
    LENGTH_FILE: 64 << 10,
}
"""Files of which the bundle is made, and the largest size of each in bytes."""

_IGNORED = re.compile(
    r"""
    .*\.(md|txt|png|jpg|csv|log|jsonl|ya?ml|py|pyc)        # notes, plots, logs, and the trainer's own settings
    | \.git(attributes|ignore)
    | training_args\.(bin|json) | trainer_state\.json | (all|train|eval)_results\.json
    | (optimizer|scheduler|scaler)\.(pt|bin) | rng_state(_\d+)?\.pth | latest | events\.out\.tfevents\..*
    | random_states_\d+\.pkl | pytorch_model_fsdp\.bin       # accelerate's states
    | tokens_state\.json | training_params\.json             # axolotl's and AutoTrain's notes
    | global_step\d+ | checkpoint-\d+ | runs | logs | wandb
    | (?!/|(.*/)?\.\.?/).+/.*                               # other adapters and states of the run, in folders within
    | special_tokens_map\.json | vocab\.json | merges\.txt | (tokenizer|spiece|sentencepiece\.bpe)\.model
    | adapter_model\.pt                                     # torchtune's second copy, in its own form
    | additional_config\.json | args\.json | configuration\.json | Modelfile | checkpoint_complete
    | (video_)?(pre)?processor_config\.json
    """,
    re.VERBOSE,
)
_PICKLED = re.compile(r".*\.(bin|pt|pth|pkl|ckpt)")
_MISPLACED = {
    re.compile(r"(.*/)?adapter_model(-\d+-of-\d+\.(safetensors|bin)|\.(safetensors|bin)\.index\.json)"): (
        "a part of a sharded adapter, and an adapter is one file here: load it with PEFT and save it with "
        "save_pretrained, which writes one adapter_model.safetensors."
    ),
    re.compile(r"(.*/)?(\d+_)?adapters\.(safetensors|npz)"): (
        "how mlx-lm saves an adapter, with names and a scale of its own. Convert it to PEFT's form "
        "(adapter_config.json with lora_alpha = scale * rank, lora_A and lora_B transposed)."
    ),
    re.compile(r"(.*/)?lit_model\.pth(\.lora)?"): (
        "how litgpt saves a model or an adapter: a pickle, with names and joined linears of its own. litgpt converts "
        "neither to PEFT's form, so train the adapter with PEFT."
    ),
    re.compile(r"(.*/)?value_head\.(safetensors|bin)"): (
        "a value head. A reward model is served as a classifier alone: train it with task_type SEQ_CLS and one label, "
        "as TRL's RewardTrainer does. The adapter of a policy (PPO) needs no value head: leave this file out."
    ),
}
"""Files of forms that are not served, and what they are, with the correction."""


ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
"""The problem types, by transformers' names: probabilities from one softmax, from a sigmoid per class, or no
probabilities.
"""


class AddedToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that the base's tokenizer lacks or has in another form, with the tokenizers library's field names."""

    id: Annotated[int, Meta(ge=0, lt=1 << 31)]
    content: Annotated[str, Meta(min_length=1, max_length=512)]
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


@with_numbers(RECOMMENDED, lambda parameter: parameter.recommended)
class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters for requests that leave them out; None: there is no default."""

    @classmethod
    def valid(cls, saved: Mapping[str, object]) -> SamplingDefaults:
        """Keep the values that a request could have, and leave out the others."""
        found = {}
        for name in cls.__struct_fields__:
            value = saved.get(name)
            if isinstance(value, float) and value.is_integer():
                value = int(value)  # "top_k": 20.0
            with suppress(msgspec.ValidationError):
                found[name] = getattr(msgspec.convert({name: value}, cls), name)
        return cls(**found)


class Bundle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings that a revision is served with. The field names are stored data."""

    chat_template: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS)] | None = None
    """The chat template, in Jinja; None: the base's template."""
    special_tokens: dict[str, str] = {}
    """Values of the variables of `chat_template`: `bos_token`, `eos_token`, `pad_token`, ..."""
    added_tokens: Annotated[tuple[AddedToken, ...], Meta(max_length=MAX_ADDED_TOKENS)] = ()
    eos_token_ids: Annotated[tuple[int, ...], Meta(max_length=64)] = ()
    """Tokens that end an answer, instead of the base's end tokens; empty: the base's end tokens."""
    sampling: SamplingDefaults = SamplingDefaults()
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    """The longest answer in tokens, if the request sets no limit."""
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=512)], ...], Meta(max_length=MAX_STOPS)] = ()
    """Stop strings, if the request has none."""
    system_prompt: Annotated[str, Meta(max_length=64 << 10)] | None = None
    """The first message of conversations that begin without a system message."""
    tool_parser: Annotated[str, Meta(pattern="^[a-z0-9_.-]{1,64}$")] | None = None
    """The name of the parser of the adapter's tool calls; None: the base's parser."""
    task: Literal["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION"] | None = None
    """PEFT's name of the task that the adapter was trained for; None: generating text."""
    num_labels: Annotated[int, Meta(ge=0, le=MAX_LABELS)] = 0
    """Rows of a classifier's head."""
    labels: Annotated[tuple[Annotated[str, Meta(max_length=512)], ...], Meta(max_length=MAX_LABELS)] = ()
    """A classifier's classes, in the order of its head's rows."""
    problem_type: ProblemType | None = None
    """The reading of a classifier's numbers (softmax, sigmoid, none); None: each input has one class."""
    pooling: VectorPooling | None = None
    """The reduction of a text's hidden states to its vector; None: the base's, or else the last hidden state."""
    matryoshka_dimensions: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=64)] = ()
    """Lengths to which the adapter's vectors may be shortened."""
    description: Annotated[str, Meta(max_length=4096)] | None = None
    license: Annotated[str, Meta(max_length=256)] | None = None


NO_BUNDLE = Bundle()


def is_ignored(name: str) -> bool:
    """Return whether a file of a trainer's folder means nothing for serving, unless it is one of SOURCES."""
    return _IGNORED.fullmatch(name) is not None


def is_pickled(name: str) -> bool:
    """Return whether a file would have to be unpickled to be read. Such files are never read."""
    return _PICKLED.fullmatch(name) is not None


def misplaced(names: Iterable[str]) -> str | None:
    """Return the reason why these files are not the files of one adapter, and the correction; None if the form is
    unknown.
    """
    for name in names:
        for pattern, reason in _MISPLACED.items():
            if pattern.fullmatch(name) is not None:
                return f"'{name[:80]}' is {reason}"
    return None


def explain_absence(names: Iterable[str], choose: str) -> str:
    """Return why a place with these files has no adapter, and the way out.

    `choose` is the instruction for one of several folders, such as "send its URL".
    """
    found = sorted(names)
    if (reason := misplaced(name for name in found if "/" not in name)) is not None:
        return reason
    folders = [name.rpartition("/")[0] for name in found if name.endswith("/adapter_config.json")]
    if folders:
        shown = ", ".join(f"'{folder[:80]}'" for folder in folders[:MAX_NAMED])
        more = f" and {len(folders) - MAX_NAMED} more" if len(folders) > MAX_NAMED else ""
        return f"The adapters are in folders of their own: {shown}{more}. To choose one, {choose}."
    if (
        pickled := next((name for name in found if name.startswith("adapter_model.") and is_pickled(name)), None)
    ) is not None:
        return (
            f"'{pickled[:80]}' is a pickle, which may run code and is never read: load the adapter with PEFT and save "
            "it with save_pretrained, which writes adapter_model.safetensors."
        )
    return "Save the adapter with save_pretrained, which writes adapter_config.json and adapter_model.safetensors."


def encode_bundle(bundle: Bundle) -> bytes:
    """Return the bytes of `bundle.json`: equal bundles give equal bytes."""
    return msgspec.json.encode(bundle, order="sorted")


def decode_bundle(data: bytes | str) -> Bundle:
    """Read what `encode_bundle` wrote. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(data, type=Bundle)


def read_bundle(folder: Path) -> Bundle:
    """Read the bundle of a content's folder. A folder without the file has an empty bundle."""
    try:
        return decode_bundle((folder / BUNDLE_FILE).read_bytes())
    except FileNotFoundError:
        return NO_BUNDLE


def extend_tokenizer(backend: Any, added: Sequence[AddedToken]) -> Any:
    """Return a tokenizer of the tokenizers library like `backend`, with the `added` tokens; both share one model.

    Raises ValueError if the library would give a token another id.
    """
    import tokenizers  # imported here: commands without a model do not need it

    extended = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(extended, part, value)
    known = backend.get_added_tokens_decoder()
    extended.add_tokens([known[id] for id in sorted(known)])
    for token in sorted(added, key=lambda one: one.id):
        attributes = msgspec.structs.asdict(token)
        id, content = attributes.pop("id"), attributes.pop("content")
        extended.add_tokens([tokenizers.AddedToken(content, **attributes)])
        if (found := extended.token_to_id(content)) != id:
            raise ValueError(f"{content[:80]!r} has the id {id}; beside the base's tokens it gets {found}")
    return extended

"""Model families: one row for each `model_type` that is served, with every fact about it that the code needs.

A family that joins its layers as Llama does needs one row here, such as `Family("new", fuses_layers=True)`, and one
small model in `tests/support/adapter_zoo.py`; the tests then compare its tokens with PEFT's and the row with
transformers' modules. No other module names a family. This module loads neither torch nor transformers.

An encoder reads a whole text in both directions and generates nothing: its row is in `ENCODERS`. A family may have a
row in both tables; a field of config.json then says which of them applies (`encoder_of`).

A model of text and images has its own row. For its text, the facts of the row of `text_type` apply, if this row exists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from loramux_kernels.layer_operators import Activation

Cut = Literal["heads", "latent heads", "heads and norms over all heads", "heads and their norms", "key heads", "none"]
"""Rules by which attention is divided among ranks (`sharding.py`):

    heads                           queries, keys and values by their heads
    latent heads                    multi-head latent attention: latents are whole, and the tensors made of them are
                                    cut by heads
    heads and norms over all heads  the norms of queries and keys are over all heads together: so their weights are too
    heads and their norms           the norms' weights have a row for each head
    key heads                       queries come with a gate of the same width; linear attention is cut by key heads
    none                            one rank serves the whole
"""

TowerInput = Literal["patches", "a picture", "a square", "placed patches"]
"""Input of a vision tower: patches in the order of the image processor with their grid, a picture with its size, a
picture of one size, or patches with the column and the line of each."""

GATES: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations of gated networks, by transformers' names, and the kernels' names of them."""

SIBLINGS = (frozenset(("q_proj", "k_proj", "v_proj")), frozenset(("gate_proj", "up_proj")))
"""Names of sibling linears that read the same input in most families."""

FIXED_ROPES = frozenset(("default", "linear", "llama3", "yarn", "proportional"))
"""Rotary embeddings whose factors depend on the position alone."""

SWITCHING_ROPES = frozenset(("longrope", "dynamic"))
"""Rotary embeddings whose factors depend on the sequence's length too, from some length on; served up to that length.

transformers takes the longest position of the batch for that length. LongRoPE (Ding et al., 2024) switches from its
short to its long factors beyond `original_max_position_embeddings`; dynamic NTK rescales beyond
`max_position_embeddings`.
"""

OTHER_INPUTS = re.compile(
    r"(?:^|\.)(?:visual|vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)
"""Names of modules that read images or sound. Ranks do not divide them, and their linears stay torch's own."""

EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")
"""Stacked weights of a mixture's experts, `[experts, out_features, in_features]` each, in the order in which
transformers registers them; see `ExpertForm.is_transposed`."""

UNGATED_PARAMETERS = ("up_proj", "down_proj")
"""The same for experts without a gate."""

LATENT_EXPANSION = "kv_b_proj"
"""The linear that makes keys and values of a compressed KV, in families of latent attention (MLA)."""


@dataclass(frozen=True, slots=True)
class NormForm:
    """The RMSNorm of a family."""

    rounds_last: bool = False
    """True if the product with the weight is taken in float32, before the result is rounded to the model's dtype."""
    stores_distance_from_one: bool = False
    """True if the saved weight is the factor minus one."""


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """The mixture of experts in a family's layers."""

    router: str = "gate"
    """Name of the module that chooses the experts. If this module has no weight itself, a linear in it is a site."""
    is_transposed: bool = False
    """True if the weights are stored as `[experts, in_features, out_features]`."""
    alternates_gate_and_up: bool = False
    """True if outputs of `gate_up_proj` belong to gate and up alternately, and are not two halves."""
    is_published_in_mxfp4: bool = False
    """True if published checkpoints hold the weights as four-bit floats (MXFP4)."""
    is_optional: bool = False
    """True if only some of the family's models have experts."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """The layers of a family that keep a state of fixed size for each sequence instead of KV."""

    module: str
    """Name of transformers' module in a decoder layer."""
    rule: Literal["gated delta", "mamba 2", "short convolution"] = "gated delta"
    """The recurrence of the states."""

    @property
    def kind(self) -> str:
        """The kind of model, as docs/models.md names it."""
        kinds = {"gated delta": "linear attention", "mamba 2": "Mamba 2", "short convolution": "short convolutions"}
        return f"hybrid with {kinds[self.rule]}"


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The images of a family's prompts: rows of the vision tower replace the embeddings of placeholders."""

    tower_reads: TowerInput = "patches"
    has_places: bool = True
    """True if each token has a position in time, height and width (M-RoPE); False: positions count tokens."""
    sees_ahead: Literal["nowhere", "in every layer", "in windows"] = "nowhere"
    """Layers in which a token of an image sees the image's later tokens too: none, all, or those with a window if the
    config says `use_bidirectional_attention = "vision"`. A step then computes the whole of an image."""
    breaks_lines: bool = False
    """True if a token of text follows each line of placeholders: the processor's break token, after the last line its
    end token."""


@dataclass(frozen=True, slots=True)
class MultiTokenForm:
    """The head for multi-token prediction (MTP) of a family: one more decoder layer, as checkpoints name its parts.

    Its projection reads a token's embedding first, and then the hidden state. A checkpoint may have several heads.
    """

    location: str
    """The names of the first head's tensors, as messages show them. `{layers}` is the number of the base's layers."""
    parts: Mapping[str, str]
    """Beginnings of the names of `MultiTokenHead`'s parts, by patterns of the names in checkpoints; the first pattern
    that fits counts. Its group is the head's number."""
    ends_with_base_norm: bool = False
    """True if the head has no norm after its layer, and the base's last norm takes its place."""
    is_served: bool = True
    """False: the head's weights are ignored."""

    def part_of(self, name: str, num_layers: int) -> tuple[int, str] | None:
        """Return the head to which the tensor `name` belongs, from 0, and its name there; None: it belongs to none."""
        for pattern, part in self.parts.items():
            if found := re.match(pattern, name):
                first = num_layers if "{layers}" in self.location else 0
                head = int(found[1]) - first if found.groups() else 0
                return (head, part + name[found.end() :]) if head >= 0 else None
        return None


@dataclass(frozen=True, slots=True)
class Family:
    """One model family."""

    model_type: str
    """transformers' name of the family, as in config.json."""
    text_type: str = ""
    """The `model_type` of the text, if the family reads images too; empty: it reads text alone."""
    loads_text_alone: bool = False
    """True if the text's own model is made from the checkpoint: the weights of the other parts are not loaded."""
    images: ImageForm | None = None
    """The images of prompts, if they are served too; None: the family's text alone is served."""
    fuses_layers: bool = False
    """True if the layer is two sublayers on one residual stream, as `fused_layers.py` describes them, with queries and
    keys rotated by halves. Other layers may have the same parts and join them differently."""
    norm: NormForm = NormForm()
    """The form of all norms; read if `fuses_layers`, or if ranks share a norm."""
    angles_by_layer: bool = False
    """True if layers rotate queries and keys by different angles."""
    activations: frozenset[str] = frozenset(GATES)
    """Activations, of GATES, with which a gated network is computed in fewer operators. With another activation, the
    network runs as transformers' own module.
    """
    same_input: tuple[frozenset[str], ...] = SIBLINGS
    """Groups of sibling linears to which transformers feeds the same tensor."""
    experts: ExpertForm | None = None
    cut: Cut = "heads"
    derives_head_width: bool = False
    """True if transformers' classes derive a head's width from the number of heads, which a narrower config would
    change. Then a rank's model is made from the whole config, without memory, and its parameters are cut."""
    states: StateForm | None = None
    """Layers that keep states; None: the family has no such layers."""
    peft_refuses_out_proj: bool = False
    """True if PEFT refuses pairs on `out_proj`, by the base's `model_type`: a fused kernel for training reads only the
    weight. On a CPU transformers calls the linear."""
    multi_token: MultiTokenForm | None = None
    """The head for multi-token prediction that checkpoints may have; None: the family has none."""
    ropes: frozenset[str] = FIXED_ROPES | SWITCHING_ROPES
    """The rope types that are served."""
    recomputes_rope: bool = False
    """True if the rotary module computes its factors in every forward, on the host, with a scale that depends on the
    whole batch. Instead, the module always uses the factors with which it was built."""

    @property
    def compresses_kv(self) -> bool:
        """True if attention is multi-head latent attention, whose cache holds one compressed KV for all heads."""
        return self.cut == "latent heads"

    @property
    def kind(self) -> str:
        """The kind of model, as docs/models.md names it."""
        if self.text_type:
            return "text and images" if self.images else "the text of a model of text and images"
        size = "dense"
        if self.experts:
            size = "dense, or mixture of experts" if self.experts.is_optional else "mixture of experts"
        if self.states:
            return f"{self.states.kind}, {size}" if self.experts else self.states.kind
        return size + (" with latent attention (MLA)" if self.compresses_kv else "")


@dataclass(frozen=True, slots=True)
class Encoder:
    """One family of encoders: models that read a whole text in both directions and give its vector or its class.

    The served model is transformers' class for classes of texts, if the family has one, and otherwise the class without
    a head. The head's linears are trained with an adapter of task type SEQ_CLS, or are the checkpoint's own.
    """

    model_type: str
    """transformers' name of the family, as in config.json."""
    body: str
    """Name of the module that makes the hidden states; empty: the model itself."""
    head: tuple[str, ...] = ("classifier",)
    """The linears of the head, in their order; the first reads the state of one token. Empty: the family has none."""
    activation: Literal["tanh", "gelu", "relu"] = "tanh"
    """The activation between two linears of the head."""
    transform: str | None = None
    """Name of a module of the checkpoint between the hidden states and the head; None: the family has none."""
    same_input: tuple[frozenset[str], ...] = ()
    """Groups of sibling linears to which transformers feeds the same tensor."""
    starts_after_padding: bool = False
    """True if the first position is the one after the number of the padding token."""
    head_has_bias: bool = True
    head_of_tokens: tuple[str, ...] = ("classifier",)
    """The linears of the head that classifies each token (task type TOKEN_CLS); empty: the family has none."""
    classifies_last: bool = False
    """True if the head reads the state of the last token; else that of the first."""
    width_field: str = "hidden_size"
    """Field of the config with the width of the hidden states."""
    marked_by: str = ""
    """Field of config.json that is true in checkpoints of encoders; empty: all checkpoints of the family are."""
    loads_text_alone: bool = False
    """True if the text's own model is made from the checkpoint: the weights of the other parts are not loaded."""

    def has_transform(self, task: str | None) -> bool:
        """Return whether heads of a task read the states through `transform`: a part of the body pools a text."""
        if task == "TOKEN_CLS":
            return self.transform is not None and not self.transform.startswith(f"{self.body}.")
        return task == "SEQ_CLS" and self.transform is not None


GEMMA_NORM = NormForm(rounds_last=True, stores_distance_from_one=True)
OLMO_NORM = NormForm(rounds_last=True)
HYBRID_SIBLINGS = (
    *SIBLINGS,
    frozenset(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
    frozenset(("in_proj_qkvz", "in_proj_ba")),
)
DELTA_NET = StateForm("linear_attn")
QWEN_HEAD = MultiTokenForm("mtp.*", {r"mtp\.": ""})
IGNORED_HEAD = replace(QWEN_HEAD, is_served=False)
NEXT_LAYER = r"model\.layers\.(\d+)\."
LAYER_HEAD = MultiTokenForm(
    "model.layers.{layers}.*",
    {
        NEXT_LAYER + r"enorm\.": "pre_fc_norm_embedding.",
        NEXT_LAYER + r"hnorm\.": "pre_fc_norm_hidden.",
        NEXT_LAYER + r"eh_proj\.": "fc.",
        NEXT_LAYER + r"shared_head\.norm\.": "norm.",
        NEXT_LAYER + r"shared_head\.head\.": "lm_head.",  # usually a copy of the base's, as the next
        NEXT_LAYER + r"embed_tokens\.": "embed_tokens.",
        NEXT_LAYER: "layers.0.",
    },
)
ERNIE_HEAD = MultiTokenForm(
    "model.mtp_*",
    {
        r"model\.mtp_emb_norm\.(\d+)\.": "pre_fc_norm_embedding.",
        r"model\.mtp_hidden_norm\.(\d+)\.": "pre_fc_norm_hidden.",
        r"model\.mtp_linear_proj\.(\d+)\.": "fc.",
        r"model\.mtp_block\.(\d+)\.": "layers.0.",
    },
    ends_with_base_norm=True,
)
M_ROPE = ImageForm()

ROWS = (
    Family("llama", fuses_layers=True),
    Family("qwen2", fuses_layers=True),
    Family("qwen3", fuses_layers=True),
    Family("mistral", fuses_layers=True),
    Family("ministral"),
    Family("ministral3"),  # this family scales queries by their positions
    Family("gemma", fuses_layers=True, norm=GEMMA_NORM),
    Family("gemma2", fuses_layers=True, norm=GEMMA_NORM),
    Family("gemma3_text", fuses_layers=True, norm=GEMMA_NORM, angles_by_layer=True),
    # multiplies the stream after each layer; in some sizes, layers read a separate row of each token
    Family("gemma4_text", experts=ExpertForm("router", is_optional=True)),
    # layers keep several streams of each token; in some, a gate keeps the largest of all its outputs
    Family("gemma3n_text", cut="none"),
    Family("phi3", fuses_layers=True),
    Family("olmo2", fuses_layers=True, norm=OLMO_NORM, cut="heads and norms over all heads"),
    Family("olmo3", fuses_layers=True, norm=OLMO_NORM, angles_by_layer=True, cut="heads and norms over all heads"),
    Family("granite", fuses_layers=True),
    Family("granite_swa", fuses_layers=True, angles_by_layer=True),
    Family("smollm3", fuses_layers=True),
    Family("glm"),  # rotates neighbouring elements, as glm4 does
    Family("glm4"),
    Family("cohere", cut="heads and their norms"),
    Family("cohere2"),
    Family("exaone4"),
    Family("seed_oss", fuses_layers=True),
    Family("ernie4_5"),
    Family("hunyuan_v1_dense"),
    Family("starcoder2"),
    Family("arcee", fuses_layers=True),
    Family("apertus"),
    Family("cwm", fuses_layers=True),
    Family("mixtral", fuses_layers=True, experts=ExpertForm()),
    Family("qwen2_moe", fuses_layers=True, experts=ExpertForm()),
    Family("qwen3_moe", fuses_layers=True, experts=ExpertForm()),
    Family(
        "gpt_oss",
        experts=ExpertForm("router", is_transposed=True, alternates_gate_and_up=True, is_published_in_mxfp4=True),
    ),
    Family("glm4_moe", fuses_layers=True, experts=ExpertForm(), multi_token=LAYER_HEAD),
    Family("granitemoe", experts=ExpertForm("router")),
    Family("granitemoeshared", experts=ExpertForm("router")),
    Family("olmoe", experts=ExpertForm(), cut="heads and norms over all heads", derives_head_width=True),
    Family("phimoe", experts=ExpertForm("router"), recomputes_rope=True),
    Family("ernie4_5_moe", experts=ExpertForm(), multi_token=ERNIE_HEAD),
    Family("dots1", fuses_layers=True, experts=ExpertForm()),
    Family("deepseek_v2", experts=ExpertForm(), cut="latent heads"),
    Family("deepseek_v3", experts=ExpertForm(), cut="latent heads", multi_token=LAYER_HEAD),
    Family("glm4_moe_lite", experts=ExpertForm(), cut="latent heads", multi_token=LAYER_HEAD),
    Family("minimax_m2", fuses_layers=True, experts=ExpertForm(), cut="heads and norms over all heads"),
    Family("solar_open", fuses_layers=True, experts=ExpertForm()),
    Family("exaone_moe", experts=ExpertForm(), multi_token=IGNORED_HEAD),  # rotates in some layers
    Family("granitemoe_swa", experts=ExpertForm("router")),
    Family("cohere2_moe", experts=ExpertForm()),
    Family("qwen3_5_text", same_input=HYBRID_SIBLINGS, cut="key heads", states=DELTA_NET, multi_token=QWEN_HEAD),
    Family(
        "qwen3_next",
        same_input=HYBRID_SIBLINGS,
        experts=ExpertForm(),
        cut="key heads",
        states=DELTA_NET,
        multi_token=QWEN_HEAD,
    ),
    Family(
        "qwen3_5_moe_text",
        same_input=HYBRID_SIBLINGS,
        experts=ExpertForm(),
        cut="key heads",
        states=DELTA_NET,
        multi_token=QWEN_HEAD,
    ),
    # Granite 4; some sizes have attention in every layer, and no states
    Family("granitemoehybrid", experts=ExpertForm("router", is_optional=True), states=StateForm("mamba", "mamba 2")),
    Family("bamba", states=StateForm("mamba", "mamba 2")),
    Family("falcon_h1", states=StateForm("mamba", "mamba 2"), peft_refuses_out_proj=True),
    Family("lfm2", states=StateForm("conv", "short convolution")),
    Family("lfm2_moe", experts=ExpertForm(), states=StateForm("conv", "short convolution")),
    Family("olmo_hybrid", states=DELTA_NET),
    Family(
        "nemotron_h",
        experts=ExpertForm(is_optional=True),
        states=StateForm("mixer", "mamba 2"),
        peft_refuses_out_proj=True,
        multi_token=IGNORED_HEAD,
    ),
    Family(
        "gemma3",
        text_type="gemma3_text",
        images=ImageForm(tower_reads="a square", has_places=False, sees_ahead="in every layer"),
    ),
    Family("gemma3n", text_type="gemma3n_text", loads_text_alone=True),  # its vision part needs the library timm
    Family(
        "gemma4",
        text_type="gemma4_text",
        images=ImageForm(tower_reads="placed patches", has_places=False, sees_ahead="in windows"),
    ),
    Family(
        "mistral3",
        text_type="mistral",
        images=ImageForm(tower_reads="a picture", has_places=False, breaks_lines=True),
    ),
    Family("qwen2_vl", text_type="qwen2_vl_text", images=M_ROPE, derives_head_width=True),
    Family("qwen2_5_vl", text_type="qwen2_5_vl_text", images=M_ROPE, derives_head_width=True),
    Family("qwen3_vl", text_type="qwen3_vl_text", images=M_ROPE),
    Family("qwen3_vl_moe", text_type="qwen3_vl_moe_text", images=M_ROPE, experts=ExpertForm()),
    Family("qwen3_5", text_type="qwen3_5_text", images=M_ROPE),
    Family("qwen3_5_moe", text_type="qwen3_5_moe_text", images=M_ROPE),
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in ROWS}
"""Families that are served, by `model_type`: tests compare their tokens with PEFT's. Other families may call the
attention function and still be computed wrongly, so they are refused at start."""

_QUERY_KEY_VALUE = (frozenset(("query", "key", "value")),)
_TWO_LINEARS = ("classifier.dense", "classifier.out_proj")
EMBEDDING_GEMMA2 = Encoder(
    "embedding_gemma2_text", "", width_field="embedding_dim", head=(), head_of_tokens=(), same_input=SIBLINGS
)
ENCODER_ROWS = (
    Encoder("bert", "bert", transform="bert.pooler", same_input=_QUERY_KEY_VALUE),
    Encoder("roberta", "roberta", _TWO_LINEARS, same_input=_QUERY_KEY_VALUE, starts_after_padding=True),
    Encoder("xlm-roberta", "roberta", _TWO_LINEARS, same_input=_QUERY_KEY_VALUE, starts_after_padding=True),
    Encoder("camembert", "roberta", _TWO_LINEARS, same_input=_QUERY_KEY_VALUE, starts_after_padding=True),
    Encoder("modernbert", "model", transform="head"),
    Encoder("electra", "electra", _TWO_LINEARS, activation="gelu", same_input=_QUERY_KEY_VALUE),
    Encoder(
        "distilbert",
        "distilbert",
        ("pre_classifier", "classifier"),
        activation="relu",
        same_input=(frozenset(("q_lin", "k_lin", "v_lin")),),
    ),
    Encoder(
        "gemma3_text",
        "model",
        marked_by="use_bidirectional_attention",
        head=("score",),
        head_has_bias=False,
        head_of_tokens=(),
        classifies_last=True,
        same_input=SIBLINGS,
    ),
    EMBEDDING_GEMMA2,
    replace(EMBEDDING_GEMMA2, model_type="embedding_gemma2", loads_text_alone=True),
)

ENCODERS: Mapping[str, Encoder] = {encoder.model_type: encoder for encoder in ENCODER_ROWS}
"""Encoders that are served, by `model_type`."""

_INDEXED = (
    "its attention reads only the earlier tokens that a trained indexer chooses, which the engine does not compute"
)
_ROUTER = (
    "PEFT saves pairs on its router's linear as those of a parameter, gate.weight, which the engine does not serve"
)
_CHUNKED = (
    "its attention is cut into chunks of attention_chunk_size tokens, which transformers applies in a mask alone: the "
    "engine would read the whole context"
)
NOT_SERVED: Mapping[str, str] = {
    "deepseek_v32": _INDEXED,
    "deepseek_v4": f"{_INDEXED}, and compresses the others",
    "glm_moe_dsa": _INDEXED,
    "glm5_next": _INDEXED,
    "kimi_linear": "its linear attention forgets by channel, and the engine computes one decay for each head",
    "llama4": _CHUNKED,
    "llama4_text": _CHUNKED,
    "afmoe": _ROUTER,
    "hunyuan_v1_moe": _ROUTER,
    "nemotron": "transformers' layers do not pass the step on to attention, which needs its pages",
    "falcon": "its attention does not call the function that reads the page pool",
    "mistral4": "transformers has it only as the text of a model of images, and no test compares it with PEFT",
    "step3p7": "its layers differ in their number of heads and limit activations, and no test compares them with PEFT",
}
"""Families that are refused for a known reason, by `model_type`."""

SAME_INPUT = tuple(dict.fromkeys(group for row in (*ROWS, *ENCODER_ROWS) for group in row.same_input))
"""Names of sibling linears to which transformers feeds the same tensor, of all families."""

MXFP4_FAMILIES = tuple(family.model_type for family in ROWS if family.experts and family.experts.is_published_in_mxfp4)

ROUTERS = tuple(dict.fromkeys(family.experts.router for family in ROWS if family.experts))
"""Names of the modules that choose experts, of all families."""


def images_of(model_type: str) -> ImageForm | None:
    """Return the images of the prompts of a family; None if it reads text alone, or its text alone is served."""
    family = FAMILIES.get(model_type)
    return None if family is None else family.images


def merge_of(config: PretrainedConfig, form: ImageForm) -> int:
    """Return the patches along an edge of the square that becomes one placeholder of a model with images of `form`."""
    vision = config.vision_config
    match form.tower_reads:
        case "placed patches":
            return int(vision.pooling_kernel_size)
        case "a square":
            return int(vision.image_size // vision.patch_size // math.isqrt(config.mm_tokens_per_image))
    return int(getattr(vision, "spatial_merge_size", None) or config.spatial_merge_size)


def reads_other_inputs(name: str) -> bool:
    """Return whether `name` is of a module, or of a parameter of a module, that reads images or sound."""
    return OTHER_INPUTS.search(name) is not None


def encoder_of(config: Mapping[str, Any] | PretrainedConfig) -> Encoder | None:
    """Return the row of the encoder that a config.json describes; None: the checkpoint generates text."""
    read = config.get if isinstance(config, Mapping) else partial(getattr, config)
    found = ENCODERS.get(str(read("model_type", None)))
    if found is None or (found.marked_by and read(found.marked_by, None) is not True):
        return None
    return found


def loads_text_alone(model_type: str) -> bool:
    """Return whether only the text's model is made from checkpoints of this `model_type`."""
    row = ENCODERS.get(model_type) or FAMILIES.get(model_type)
    return row is not None and row.loads_text_alone


def family_of(config: PretrainedConfig) -> Family:
    """Return the row of the text that `config` describes; without such a row, return a row without known facts."""
    return family_of_text(config.get_text_config().model_type)


def family_of_text(model_type: str) -> Family:
    """Return the row of a text model's `model_type`."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    return next((row for row in FAMILIES.values() if row.text_type == model_type), Family(model_type))


def tensors_of_heads(config: PretrainedConfig, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Return the tensors, of the `names` in a checkpoint, of its heads for multi-token prediction: the head's number
    and the tensor's name there.

    A layer after the base's last one is a head if it has a projection; other layers are none.
    """
    if (form := family_of(config).multi_token) is None:
        return {}
    num_layers = config.get_text_config().num_hidden_layers
    found = {name: part for name in names if (part := form.part_of(name, num_layers)) is not None}
    heads = {head for head, part in found.values() if part.startswith("fc.")}
    return {name: part for name, part in found.items() if part[0] in heads or not form.is_served}

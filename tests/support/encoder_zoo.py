"""Tiny random encoders, adapters of them as PEFT saves them, and an engine that serves both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from adapter_zoo import EXACT
from safetensors.torch import save_file
from task_adapters import TaskAdapter
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from loramux.common.settings.file import Settings
from loramux.common.settings.serving import EngineSettings, ModelSettings
from loramux.engine.engine import Engine, build_engine
from loramux.engine.execution.loader import load_model
from loramux.engine.messages import AdapterRef, Pooling, Request, SamplingParams, TokenEvent
from loramux_adapters.base import describe_base
from loramux_adapters.convert.renaming import rename_adapter
from loramux_adapters.plan import PlanLimits

TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
GROUPED |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
NARROW = GROUPED | {"sliding_window": 11, "global_head_dim": 28, "num_global_key_value_heads": 1}
NARROW |= {"hidden_size_per_layer_input": 14, "embedding_dim": 72}


def embedding_gemma_2(**fields: Any) -> transformers.PretrainedConfig:
    """The config of the whole model, with a part for images."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision = sizes | {"model_type": "gemma4_vision", "head_dim": 8, "num_key_value_heads": 2, "patch_size": 4}
    text = transformers.EmbeddingGemma2TextConfig(**fields).to_dict()
    return transformers.EmbeddingGemma2Config(text_config=text, vision_config=vision, audio_config=None)


ENCODERS: dict[str, tuple[Callable[..., transformers.PretrainedConfig], dict[str, Any]]] = {
    "bert": (transformers.BertConfig, {"pad_token_id": 0}),
    "roberta": (transformers.RobertaConfig, {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm_roberta": (transformers.XLMRobertaConfig, {"pad_token_id": 1, "type_vocab_size": 1}),
    "camembert": (transformers.CamembertConfig, {"pad_token_id": 1, "type_vocab_size": 1}),
    "modernbert": (
        transformers.ModernBertConfig,
        {"pad_token_id": 0, "local_attention": 20, "num_hidden_layers": 4, "cls_token_id": 1, "sep_token_id": 2}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "electra": (transformers.ElectraConfig, {"pad_token_id": 0, "embedding_size": 40}),
    "distilbert": (
        transformers.DistilBertConfig,
        {"pad_token_id": 0, "dim": 48, "hidden_dim": 72, "n_layers": 3, "n_heads": 4},
    ),
    "gemma3_text": (
        transformers.Gemma3TextConfig,
        GROUPED | {"use_bidirectional_attention": True, "sliding_window": 30, "query_pre_attn_scalar": 20},
    ),
    "embedding_gemma2_text": (transformers.EmbeddingGemma2TextConfig, NARROW),
    "embedding_gemma2": (embedding_gemma_2, NARROW),
}
"""Configurations, or functions that make them, by their families' names."""


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """BERT's kind: lower case, characters as pieces of words, two texts of a pair with their types."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)] + list("0123456789.,?!'-")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", model_input_names=names, **special
    )


def write_modules(folder: Path, kinds: Sequence[str], pooling: str = "mean") -> None:
    """Write sentence-transformers' list of modules, and the file of its pooling."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    if "Pooling" in kinds:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{pooling}_tokens": True}))


def write_dense(folder: Path, width: int, out: int, *, bias: bool, activation: str) -> torch.nn.Sequential:
    """Save a Dense module as sentence-transformers does; return what it computes."""
    linear = torch.nn.Linear(width, out, bias)
    folder.mkdir(exist_ok=True)
    config = {"in_features": width, "out_features": out, "bias": bias}
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": activation}))
    save_file({f"linear.{name}": weight for name, weight in linear.state_dict().items()}, folder / "model.safetensors")
    return torch.nn.Sequential(linear, getattr(torch.nn, activation.rpartition(".")[2])()).requires_grad_(False)


class EncoderZoo:
    """One tiny base with adapters for vectors and for classes."""

    def __init__(self, family: str, root: Path, **fields: Any) -> None:
        self.base, self.adapters = root / "base", root / "adapters"
        config_class, extra = ENCODERS[family]
        torch.manual_seed(1)
        known = {
            name: v for name, v in TINY.items() if hasattr(config_class, name) or config_class is embedding_gemma_2
        }
        config = config_class(**known | extra | fields)
        predicts = type(config) in MODEL_FOR_MASKED_LM_MAPPING
        model = (transformers.AutoModelForMaskedLM if predicts else transformers.AutoModel).from_config(config)
        if hasattr(model, "bert"):  # a pre-trained checkpoint has the pooler too
            model = transformers.AutoModelForPreTraining.from_config(model.config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else parameter.data.add_(
                torch.randn(parameter.shape) * 0.1
            )
        model.save_pretrained(self.base)
        self.description = describe_base(self.base)
        self.plain = transformers.AutoModel.from_pretrained(self.base, dtype=torch.float32, **EXACT).eval()
        self.made: dict[str, TaskAdapter] = {}

    def add(self, name: str, num_labels: int | None = None, **lora: Any) -> TaskAdapter:
        """Train nothing, and save an adapter as PEFT does; it is served with the names of the base."""
        uploaded = self.adapters / f"{name} uploaded"
        self.made[name] = TaskAdapter(self.base, uploaded, len(self.made), num_labels, **lora)
        served = self.adapters / name
        served.mkdir(parents=True)
        if rename_adapter(uploaded, served, self.description, PlanLimits()) is None:
            served.rmdir()
            uploaded.rename(served)
        return self.made[name]

    def request(self, name: str, adapter: str | None, prompt: list[int], pooling: Pooling, **fields: Any) -> Request:
        """Return a request for a vector or for classes."""
        ref = None if adapter is None else AdapterRef(digest=adapter, path=str(self.adapters / adapter))
        sampling = SamplingParams(max_tokens=1)
        return Request(
            id=name, tenant="t", prompt_token_ids=prompt, sampling=sampling, adapter=ref, pooling=pooling, **fields
        )

    def engine(self, **fields: Any) -> Engine:
        """Start an engine."""
        defaults: dict[str, Any] = {"device": "cpu", "pool_bytes": 64 << 20, "num_threads": 1}
        settings = Settings(
            model=ModelSettings(path=str(self.base), served_model_name="tiny", dtype="float32"),
            engine=EngineSettings(**defaults | fields),
        )
        return build_engine(load_model(settings), settings, wake=lambda: None)


def run(engine: Engine, requests: list[Request], arrivals: int = 2) -> dict[str, TokenEvent]:
    """Run the requests to their ends; `arrivals` of them arrive before each step."""
    waiting, ends = list(requests), {}
    while waiting or not engine.is_idle:
        for request in waiting[:arrivals]:
            engine.submit(request)
        del waiting[:arrivals]
        report = engine.step()
        for event in report.events if report else []:
            assert event.request_id not in ends, "a vector is one event"
            ends[event.request_id] = event
    return ends

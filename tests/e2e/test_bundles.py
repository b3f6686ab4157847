"""A folder as TRL saves it, served with other adapters: the tokens are PEFT's, with that tokenizer and that
template."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import peft
import torch
import transformers
from format_matrix import SERVED
from other_kinds import make_kind
from server_process import Place, served
from tiny_base import byte_tokenizer

from loramux_client import Client

ADDED = [f"<|part_{i}|>" for i in range(8)]
TEMPLATE = (
    "{% for m in messages %}<|part_0|>{{ m.role }}<|part_1|>{{ m.content }}<|part_2|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|part_0|>assistant<|part_1|>{% endif %}"
)
OTHERS = ("lora", "dora", "ia3", "lora-saved")
MESSAGES = [{"role": "user", "content": f"call <|part_5|> and {ADDED[7]}"}]
PROMPT = [5, 80, 33, 7, 12]
OUTPUT = 12


def train(base_dir: Path, folder: Path) -> peft.PeftModel:
    """Train, in a manner of speaking, with 8 added tokens; save what trl.SFTTrainer.save_model saves."""
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ADDED})
    model = transformers.AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer))
    saved = ["embed_tokens", "lm_head"]
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", modules_to_save=saved)
    trained = peft.get_peft_model(model, lora)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in (one for one in trained.parameters() if one.requires_grad):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    trained.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training_args.bin").write_bytes(b"a pickle that nothing opens")
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---")
    return trained.eval()


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    keywords = dict(max_new_tokens=OUTPUT, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(input_ids=torch.tensor([prompt]), **keywords)[0, len(prompt) :].tolist()


def test_folder_of_trl_with_added_tokens_answers_as_peft_does(base_dir: Path, tmp_path: Path) -> None:
    trained = train(base_dir, tmp_path / "trained")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "trained")
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert len(set(prompt) & set(tokenizer.convert_tokens_to_ids(ADDED))) == 5
    wanted = {"trained": greedy(trained, prompt)}
    for name in OTHERS:
        wanted[name] = greedy(make_kind(base_dir, tmp_path / name, copy.deepcopy(SERVED[name])), PROMPT)
    (tmp_path / "server").mkdir()
    place = Place(tmp_path / "server", base_dir).prepare()
    key = place.key_of("acme")
    with served(place) as server, server.http(key) as http, Client(server.url, api_key=key) as client:
        for name in wanted:
            client.uploads.push(tmp_path / name, name)
        bundle = client.adapters.revision("trained", 1).bundle
        assert bundle is not None
        assert [token.content for token in bundle.added_tokens] == ADDED

        def ask(name: str) -> list[int]:
            common = {"model": f"acme/{name}", "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
            common["return_token_ids"] = True
            if name == "trained":
                answer = http.post("/v1/chat/completions", json=common | {"messages": MESSAGES})
            else:
                answer = http.post("/v1/completions", json=common | {"prompt": PROMPT})
            assert answer.status_code == 200, answer.text
            return list(answer.json()["choices"][0]["token_ids"])

        asked = [name for name in wanted for _ in range(3)]
        with ThreadPoolExecutor(len(asked)) as pool:
            for name, tokens in zip(asked, pool.map(ask, asked), strict=True):
                assert tokens == wanted[name], name
        refused = http.post("/v1/completions", json={"model": "acme/lora", "prompt": [5, 262]})
        assert refused.status_code == 400, "another revision's tokens are not this one's"

"""A tiny model and a tokenizer of bytes for the tests of the evaluation: one token per byte, so counts are easy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_kvquant import KVQuantConfig
from tests import tiny

END = "<end>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if not (loop.last and continue_final_message) %}"
    "</{{ m['role'] }}>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
POSITIONS = 3000


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE({character: i for i, character in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=END)
    made.chat_template = CHAT_TEMPLATE
    return made


def model(positions: int = POSITIONS) -> Any:
    """Random, with large weights and an untied head, so that it says many different things."""
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=positions,
        initializer_range=0.25,
        tie_word_embeddings=False,
        eos_token_id=256,
        bos_token_id=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def save(folder: Path) -> Path:
    """A model folder, as ``pretrained`` names one."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_config(path: Path, config: KVQuantConfig | None = None) -> str:
    """A configuration as JSON, a lossless one by default."""
    path.write_text((config or tiny.lossless()).to_json())
    return str(path)


def text(characters: int, seed: int = 0) -> str:
    """Random letters, which a random model finds as likely as anything else."""
    draws = torch.randint(97, 123, (characters,), generator=torch.Generator().manual_seed(seed))
    return "".join(map(chr, draws.tolist()))


def request(kind: Any, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0)

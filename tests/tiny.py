"""Tiny random models, and what every test that runs one needs around it.

Decision: a random model with the usual small initialization repeats one token, whatever its cache holds, and equality
of tokens then proves nothing. These have large weights and an untied head, so that they say many different tokens and
feel a damaged cache; ``test_generate.py`` asserts both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache, EncoderDecoderCache

from hf_kvquant import KVQuantConfig, QuantizedKVCache, TensorSpec
from hf_kvquant._compat import cache_argument
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.rotary import Pending, RotaryLayout

# Forwards of this size are all overhead: one thread is 5 to 20 times faster than two that wait for each other on a
# busy machine.
torch.set_num_threads(1)

# Up to 5.23 the argument of forward and generate is past_key_values alone, and models do not hand position ids on.
BEFORE_5_24 = cache_argument(transformers.LlamaForCausalLM.forward) != "cache"

VOCABULARY = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SLIDING = {"sliding_window": 24}
_ALTERNATING = {
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_expand": 2}
_T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "initializer_factor": 3.0,
    "feed_forward_proj": "gated-gelu",
}

# name -> (model class, config class, own fields, seed that makes it diverse)
MODELS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}, 0),
    "llama_mha": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 4}, 0),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}, 0),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _ALTERNATING | {"query_pre_attn_scalar": 16}, 0),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _ALTERNATING | {"query_pre_attn_scalar": 16}, 0),
    "mistral_sliding": ("MistralForCausalLM", "MistralConfig", _SLIDING, 0),
    "phi3_sliding": ("Phi3ForCausalLM", "Phi3Config", _SLIDING, 0),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", _ALTERNATING | _EXPERTS, 0),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _EXPERTS | {"num_hidden_layers": 4, "intermediate_size_mlp": 96, "attention_chunk_size": 24},
        0,
    ),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", _LINEAR | {"num_hidden_layers": 4}, 0),
    "bamba": ("BambaForCausalLM", "BambaConfig", _MAMBA, 0),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}, 0),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5, 2),
}


def benchmark_config() -> transformers.LlamaConfig:
    """Two layers that stand in for SmolLM2 where a benchmark is tested."""
    return transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )


@functools.cache
def load(name: str) -> Any:
    """The model of that name, in eval mode, CPU and fp32; one object per process, so leave it as it is."""
    model_class, config_class, own, seed = MODELS[name]
    config = getattr(transformers, config_class)(**(_COMMON | own))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, model_class)(config).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(batch: int, tokens: int, seed: int = 1) -> torch.Tensor:
    """``[batch, tokens]`` random ids, none of them the padding token."""
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def left_padded(ids: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The last tokens of each row of ``ids`` behind ``counts[row]`` padding tokens, and the attention mask."""
    mask = torch.ones_like(ids)
    for row, count in enumerate(counts):
        mask[row, :count] = 0
    return ids * mask, mask


def lossless(residual_length: int = 16, sink_length: int = 4) -> KVQuantConfig:
    """Full precision in closed blocks of 64 tokens, behind a small window."""
    return KVQuantConfig(TensorSpec("none"), TensorSpec("none", axis="token"), residual_length, sink_length)


def quantized(key: str = "int4", value: str = "int4", residual_length: int = 16, sink_length: int = 4) -> KVQuantConfig:
    """Keys per channel, values per token, in blocks of 16 tokens behind a small window: most of a short prompt is
    quantized."""
    return KVQuantConfig(TensorSpec(key, "channel", 16), TensorSpec(value, "token", 16), residual_length, sink_length)


def new_cache(model: Any, quantization: KVQuantConfig | str | None) -> Cache:
    """An empty cache for ``model``; ``None`` is transformers' own, ours is completed for an encoder-decoder model."""
    if quantization is None:
        own: Cache = DynamicCache(config=model.config)
    else:
        own = QuantizedKVCache(model.config, quantization)
    return EncoderDecoderCache(own, DynamicCache(config=model.config)) if model.config.is_encoder_decoder else own


def generate(model: Any, ids: torch.Tensor, cache: Cache, new_tokens: int = 40, **options: Any) -> Any:
    """``model.generate``, greedy unless told otherwise: ids of the whole sequences, or the output object."""
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "max_new_tokens": new_tokens,
    }
    return model.generate(ids, past_key_values=cache, **(settings | options))


@torch.no_grad()
def forward(model: Any, ids: torch.Tensor, cache: Cache, **options: Any) -> torch.Tensor:
    """Logits ``[batch, tokens, vocabulary]`` of one forward over the new tokens ``ids``."""
    return model(ids, past_key_values=cache, **options).logits


def states(
    batch: int, heads: int, tokens: int, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[batch, heads, tokens, dim]``, N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, batch, heads, tokens, dim, generator=generator)
    return keys.to(dtype), values.to(dtype)


def alike(fmt: str, axis: str, group: int = 16, residual: int = 0, sinks: int = 0, **fields: Any) -> KVQuantConfig:
    """Keys and values stored in the same way."""
    one = TensorSpec(fmt, axis, group, **fields)
    return KVQuantConfig(one, one, residual, sinks)


def filled(config: KVQuantConfig, pair: Sequence[torch.Tensor], chunk: int = 10**9) -> QuantizedLayer:
    """A layer that has taken in the keys and values ``pair`` in chunks."""
    layer, (keys, values) = QuantizedLayer(config), pair
    for start in range(0, keys.shape[2], chunk):
        layer.update(keys[:, :, start : start + chunk], values[:, :, start : start + chunk])
    return layer


def relative_error(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm())


def layer_tensors(layer: Any) -> dict[str, torch.Tensor]:
    """Codes, scales, zero points and exponents of a quantized layer's closed blocks, capacity cut away."""
    blocks = max((len(row.blocks) for row in layer.rows), default=0)
    found = {}
    for name, state in (("key", layer.key_state), ("value", layer.value_state)):
        if state.packed.held is not None:
            found |= {f"{name}.{part}": tensor[:, :, :blocks] for part, tensor in state.packed.held.named().items()}
    return found


def assert_same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Same names, and bit-identical tensors (NaN equals NaN)."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


HALF = RotaryLayout("key", "half", 8, 0, 1, "single", False)


def pending(queries: torch.Tensor, positions: torch.Tensor, layout: RotaryLayout = HALF, source: int = 1) -> Pending:
    """What a hook would leave of a call with these ``queries [B, H, q, D]`` at these ``positions [B, q]``; layers that
    are given the same ``source`` share their tables."""
    frequencies = 10000.0 ** (-torch.arange(layout.pairs) / layout.pairs)
    angles = positions[..., None] * frequencies
    return Pending(layout, "", lambda start, stop: queries[:, :, start:stop], (angles.cos(), angles.sin()), source)


def feed(
    cache: QuantizedKVCache,
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[int] = (),
    padding: Sequence[int] | None = None,
    layout: RotaryLayout = HALF,
    start: int = 0,
    **given: Any,
) -> None:
    """Hand every layer keys, queries and values ``[B, ., T, D]`` as an attached model would, cut into chunks;
    positions count from the end of each row's ``padding``. The tokens before ``start`` are there already."""
    keys, values, queries = tensors
    counts = torch.tensor(padding or [0] * keys.shape[0])
    for first, end in itertools.pairwise([start, *cuts, keys.shape[2]]):
        piece = slice(first, end)
        positions = (torch.arange(first, end) - counts[:, None]).clamp(min=0)
        for index in range(len(cache.layers)):
            cache.pending = pending(queries[:, :, piece], positions, layout, source=1 + first)
            options = {"kwargs": {"position_ids": positions}} | given
            cache.update(keys[:, :, piece], values[:, :, piece], index, **options)

"""A tiny configuration of any causal-LM model type that transformers can build offline, for the census.

Decision: a rule over field names, not a list of types: the type's own default configuration is taken and those of its
fields that ``SMALL`` names are made small, in nested configurations as well. Lists with one entry per layer are cut to
one layer of each kind, so that hybrids keep both. ``OVERRIDES`` holds what no rule can know.

Weights are drawn with standard deviation 1/8 = 1/sqrt(hidden_size) where a type lets us: with the usual 0.02 attention
is nearly uniform, and a wrong rotation would hardly move the logits.
"""

from __future__ import annotations

import inspect
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

_SIZES: dict[int, str] = {
    # widths
    64: "hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim embedding_size"
    " lru_width input_embedding_size output_embedding_size hidden_size_global out_hidden_size"
    " adapter_out_dim adapter_input_size adapter_in_dim output_proj_dims",
    96: "intermediate_size intermediate_size_mlp ffn_dim ffn_hidden_size dim_ff encoder_ffn_dim decoder_ffn_dim dff"
    " d_inner dense_intermediate_size feed_forward_size shared_intermediate_size prefix_dense_intermediate_size",
    # heads and their widths
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads"
    " num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_heads",
    16: "head_dim global_head_dim swa_head_dim d_head dim_head kv_channels attention_head_size linear_head_dim"
    " linear_key_head_dim linear_value_head_dim",
}
SMALL: dict[str, Any] = {
    **{name: size for size, names in _SIZES.items() for name in names.split()},
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 100),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 512),
    "encoder_hash_byte_group_vocab": 100,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "rotary_dim": 8,
    # mixtures of experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "zero_expert_num", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 32),
    # multi-head latent attention and its indexers
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 16),
    **{"q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_head_dim": 24, "index_n_heads": 4, "index_topk": 64},
    # linear attention and state-space layers
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    # standard deviation of the weights
    **dict.fromkeys(("initializer_range", "init_std"), 0.125),
}
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_MOST_KINDS = 6
# Absent by default, and that means something; other sizes without a default have to be given.
_MAY_BE_ABSENT = (
    "sliding_window",
    "q_lora_rank",
    "cross_attention_hidden_size",
    "unpadded_vocab_size",
    "embedding_size",
)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    # attention layers among recurrent ones, where the default has none or only in later layers
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    # what a default configuration lacks or refuses
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    # sizes that hang together
    "mamba2": {"num_heads": 8},
    "musicgen": {"decoder": {"num_codebooks": 1, "initializer_factor": 0.125}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1, "initializer_factor": 0.125}},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A small configuration of ``model_type``."""
    config_class = CONFIG_MAPPING[model_type]
    overrides = OVERRIDES.get(model_type, {})
    return config_class(**_merged(shrunk(_default(config_class, overrides)), overrides))


def _default(config_class: type[PreTrainedConfig], overrides: dict[str, Any]) -> PreTrainedConfig:
    """The default configuration; a few types refuse their own, and some refuse small values beside large ones."""
    try:
        return config_class()
    except (ValueError, StrictDataclassError):
        return config_class(**overrides)


def shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments that make a configuration like ``config``, but small."""
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    small = {name: _small(name, value) for name, value in fields.items()} | _layers(fields)
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        small["num_key_value_heads"] = SMALL["num_attention_heads"]
    if fields.get("head_dim") == fields.get("qk_rope_head_dim") is not None:
        small["head_dim"] = SMALL["qk_rope_head_dim"]
    if "is_decoder" in fields and not config.sub_configs:
        small["is_decoder"] = True
    if not fields.get("layer_types") and _may_be_none(config, "sliding_window"):
        small["sliding_window"] = None  # one window for all layers: without it they are full attention
    return {name: value for name, value in small.items() if name in fields and value is not fields[name]}


def _may_be_none(config: PreTrainedConfig, name: str) -> bool:
    return "None" in str(inspect.get_annotations(type(config)).get(name))


def _small(name: str, value: Any) -> Any:
    if isinstance(value, PreTrainedConfig):
        return shrunk(value)
    if name.endswith("token_id") and isinstance(value, int):
        return min(value, 1)
    is_size = type(value) in (int, float) or (value is None and name not in _MAY_BE_ABSENT)
    return SMALL[name] if name in SMALL and is_size else value


def _layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Depth and lists with one entry per layer, cut to the first layer of each kind and at least two."""
    depths = {name: fields[name] for name in _DEPTHS if isinstance(fields.get(name), int)}
    if not depths:
        return {}
    depth = next(iter(depths.values()))
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == depth > 2}
    kinds: dict[tuple[Any, ...], int] = {}
    for layer in range(depth):
        kinds.setdefault(tuple(value[layer] for value in lists.values() if isinstance(value[layer], str)), layer)
    chosen = sorted(kinds.values())[:_MOST_KINDS]
    if len(chosen) < 2:
        chosen = [0, depth - 1]
    return dict.fromkeys(depths, len(chosen)) | {name: [value[i] for i in chosen] for name, value in lists.items()}


def _merged(small: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides win; those of a nested configuration field by field."""
    nested = {name: small[name] | value for name, value in overrides.items() if isinstance(small.get(name), dict)}
    return small | overrides | nested

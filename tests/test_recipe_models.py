"""The recipe through attached models of many shapes: what the cache reads back is what the reference makes of the keys
and queries that the model handed over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_kvquant import PRESETS, QuantizedKVCache, attach
from tests import reference, tiny
from tests.test_architectures import SMALL
from tests.test_recipe import pairs_of, relative_rms
from tests.tolerances import TOLERANCES

FIELDS = SMALL | {"num_hidden_layers": 1, "initializer_range": 0.3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "head_dim 80": ("LlamaConfig", {"head_dim": 80}),
    "head_dim 96": ("LlamaConfig", {"head_dim": 96}),
    "head_dim 128, 7:1": ("LlamaConfig", {"head_dim": 128, "num_attention_heads": 14, "hidden_size": 112}),
    "head_dim 256": ("GemmaConfig", {"head_dim": 256}),
    "key bias of norm 600": ("Qwen2Config", {}),
    "partial": ("GPTNeoXConfig", {"num_attention_heads": 2, "rotary_pct": 0.25}),
    "interleaved": ("CohereConfig", {}),
    "interleaved and partial": ("GlmConfig", {"head_dim": 16}),
    "norm of queries and keys": ("Qwen3Config", {"head_dim": 32}),
}


class Recording(QuantizedKVCache):
    """Keeps what the model handed over: keys, queries, cos and sin."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kw: Any
    ) -> Any:
        assert self.pending is not None
        self.given: tuple[Any, ...] = (key_states, self.pending.queries(0, key_states.shape[2]))
        self.given += self.pending.tables
        return super().update(key_states, value_states, layer_idx, *args, **kw)


def build(name: str) -> Any:
    config_class, fields = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config_class)(**FIELDS | fields)).eval()
    if "bias" in name:
        bias = model.model.layers[0].self_attn.k_proj.bias.data
        bias.copy_(torch.nn.functional.normalize(torch.randn_like(bias), dim=0) * 600)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("preset", ["cr4", "cm3", "cm2"])
def test_attached_models_store_what_the_reference_says(preset, name) -> None:
    model, config = build(name), replace(PRESETS[preset].config, residual_length=0)
    cache = Recording(model.config, config)
    with attach(model):
        tiny.forward(model, torch.randint(3, 97, (1, 200), generator=torch.Generator().manual_seed(1)), cache)
    layer = cache.layers[0]
    assert len(layer.rows[0].blocks) == 3
    keys, queries, cos, sin = (x.double().numpy()[0] for x in cache.given)
    turns, pairs = np.arctan2(sin, cos), pairs_of(layer.rotary.layout)
    ratio = len(queries) // len(keys)
    for head in range(len(keys)):
        own = queries[head * ratio : (head + 1) * ratio]
        if preset == "cr4":
            right = reference.rotated_keys(keys[head], own, turns, pairs, 4)
        else:
            right = reference.mixed_keys(keys[head], own, turns, pairs, config.key.widths or ())
        got = layer.keys[0, head, :196]
        token_error = np.abs(got.double().numpy() - right[:196]).max(-1) / np.abs(right - keys[head]).max()
        tied = token_error > 1e-2
        assert tied.mean() <= TOLERANCES["share_of_ties"]
        assert relative_rms(got[torch.from_numpy(~tied)], right[:196][~tied]) <= TOLERANCES["recipe"]

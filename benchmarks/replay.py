"""One prefill for every cache: what the model hands to a cache is recorded once and handed to others again.

Decisions:
- The recorder is one of our caches on an attached model, so it sees what the hooks leave (the rotation of each layer),
  together with keys, values and keyword arguments of each ``update``. Replaying these is bit-identical to prefilling
  through the model as long as the first update of a cache hands its input back as it came, which ``replay`` checks.
- What attention would read from a filled cache is read once, layer by layer, into a ``DynamicCache``; probes are fed
  to that and cropped off again. Codes are written and decoded by the real cache, and no probe meets what an earlier
  one left behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.common import append, forward
from hf_kvquant import KVQuantConfig, QuantizedKVCache, TensorSpec, attach
from hf_kvquant.rotary import Pending

States = list[tuple[torch.Tensor, torch.Tensor]]
CAPTURE = "hf_kvquant_capture"


@dataclass(frozen=True)
class Update:
    """One call of ``update`` in a prefill, and what the hook of the layer had left for it."""

    layer: int
    keys: torch.Tensor
    values: torch.Tensor
    kwargs: dict[str, Any]
    pending: Pending | None

    def to(self, dtype: torch.dtype) -> Update:
        """The same as a model of that dtype would have handed it over."""
        pending = self.pending
        if pending is not None and pending.layout is not None:
            cos, sin = pending.tables
            layout = dataclasses.replace(pending.layout, expansion="single", swapped=False)
            pending = dataclasses.replace(pending, layout=layout, embeddings=(cos.to(dtype), sin.to(dtype)))
        return dataclasses.replace(self, keys=self.keys.to(dtype), values=self.values.to(dtype), pending=pending)


class Recorder(QuantizedKVCache):
    """Keeps every update of one prefill and hands it back unchanged; holds no tokens of its own."""

    def __init__(self, config: Any):
        lossless = KVQuantConfig(TensorSpec("none"), TensorSpec("none", "token"), pre_rope=True)
        super().__init__(config, lossless)
        self.updates: list[Update] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pending, self.pending = self.pending, None
        self.updates.append(Update(layer_idx, key_states, value_states, kwargs, pending))
        return key_states, value_states


def record(model: Any, ids: torch.Tensor) -> list[Update]:
    """Prefill ``ids`` [1, T] and return what each layer handed to its cache."""
    recorder = Recorder(model.config)
    with attach(model):
        forward(model, ids, recorder)
    return recorder.updates


def replay(cache: Cache, updates: list[Update]) -> Cache:
    """Fill an empty cache as the recorded prefill would have."""
    for each in updates:
        if isinstance(cache, QuantizedKVCache):
            cache.pending = each.pending
        returned = cache.update(each.keys, each.values, each.layer, **each.kwargs)
        if not all(torch.equal(*pair) for pair in zip(returned, (each.keys, each.values), strict=True)):
            raise ValueError(f"{type(cache).__name__} changes what the first update returns; prefill it by itself")
    return cache


def exact_states(updates: list[Update]) -> States:
    return [(each.keys, each.values) for each in updates]


def read_back(cache: Cache, updates: list[Update]) -> States:
    """What attention would read of every token of a filled cache; transformers' own caches only tell in an update."""
    if isinstance(cache, QuantizedKVCache):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return [cache.update(each.keys[:, :, :0], each.values[:, :, :0], each.layer) for each in updates]


def holding(config: Any, states: States) -> DynamicCache:
    """A DynamicCache with these keys and values."""
    cache = DynamicCache(config=config)
    append(cache, states)
    return cache


@dataclass(frozen=True)
class Queries:
    """Queries ``[1, H, q, D]`` of one attention call, all keys that they met ``[1, K, T + q, D]``, and the scale."""

    query: torch.Tensor
    keys: torch.Tensor
    scaling: float

    def log_attention(self, past: torch.Tensor | None = None) -> torch.Tensor:
        """Log-softmax of the causal scores ``[1, K, H / K, q, T + q]``; ``past [1, K, T, D]``, if given, stands in for
        the first keys."""
        keys = self.keys
        if past is not None:
            keys = torch.cat([past, keys[:, :, past.shape[2] :]], 2)
        query = self.query.unflatten(1, (keys.shape[1], -1)).float()
        scores = query @ keys.float()[:, :, None].transpose(-1, -2) * self.scaling
        q, total = scores.shape[-2:]
        future = torch.ones(q, total, dtype=torch.bool, device=scores.device).triu(total - q + 1)
        return scores.masked_fill(future, -torch.inf).log_softmax(-1)


@contextmanager
def capture_queries(model: Any) -> Iterator[list[Queries]]:
    """Within it every attention call of ``model`` is kept, in order; plain causal attention is assumed."""
    before = model.config._attn_implementation
    attention, kept = ALL_ATTENTION_FUNCTIONS[before], []

    def keeping(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kept.append(Queries(query, key, kwargs.get("scaling") or query.shape[-1] ** -0.5))
        return attention(module, query, key, *args, **kwargs)

    AttentionInterface.register(CAPTURE, keeping)
    AttentionMaskInterface.register(CAPTURE, ALL_MASK_ATTENTION_FUNCTIONS[before])
    model.set_attn_implementation(CAPTURE)
    try:
        yield kept
    finally:
        model.set_attn_implementation(before)

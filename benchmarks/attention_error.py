"""What stored keys and values do to attention: the measures of the notebooks on keys, values and the recipe.

Decisions:
- A tensor is judged as attention uses it: keys by the scores ``q . k * scaling`` and by the probabilities that follow,
  values by the output, both with the queries that the model really asked with.
- Nothing is emulated: one prefill is recorded, every format stores and reads it back in the real cache
  (``benchmarks.replay``).
- The last queries of a text stand for all: they see the longest past. Values are judged under exact probabilities and
  keys without values, so that each error has one cause.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.quality import kl
from benchmarks.replay import Queries, Update, capture_queries, read_back, record, replay
from benchmarks.samples import SINKS
from hf_kvquant import KVQuantConfig, QuantizedKVCache
from hf_kvquant._compat import is_full_attention, native_layers
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.memory import storage_nbytes, tensors_in
from hf_kvquant.prompt import data_path

BLOCK = 64
SHORTEST = SINKS + 128 + BLOCK  # statistics and a block more
CHARACTERS_PER_TOKEN = 8  # more than any tokenizer makes of English


@dataclass(frozen=True)
class LayerStates:
    """What one layer hands to its cache in a prefill of T tokens.

    Attributes:
        index: of the layer.
        keys, values: ``[1, K, T, D]`` as the cache gets them, fp32.
        raw_keys: the keys before RoPE; None where the layer does not rotate, or not in a way that is recognised.
        queries: those of the last tokens, with the keys that they met.
    """

    index: int
    keys: torch.Tensor
    values: torch.Tensor
    raw_keys: torch.Tensor | None
    queries: Queries


@dataclass(frozen=True)
class Capture:
    """One prefill: every update of it, and the states of the layers of plain full attention."""

    updates: list[Update]
    layers: list[LayerStates]


@dataclass(frozen=True)
class Stored:
    """What a format gives back of a capture, layer by layer as in ``Capture.layers``: keys and values ``[1, K, T, D]``,
    and the bits per element that closed blocks take, tables of the row included."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    key_bits: float
    value_bits: float


def room(model: Any, tokens: int) -> int:
    """``tokens``, or the positions of the model where it has fewer."""
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(tokens, positions or tokens)


def passage(model: Any, tokenizer: Any, tokens: int) -> torch.Tensor:
    """The first ``tokens`` ids of Persuasion ``[1, T]``; where the model has fewer positions, whole blocks behind the
    sinks.

    Raises:
        ValueError: the model has too few positions for any format with statistics.
    """
    count = room(model, tokens)
    if count < SHORTEST:
        raise ValueError(f"tokens={tokens}: the model takes {count} of them, and at least {SHORTEST} are needed")
    if count < tokens:
        count -= (count - SINKS) % BLOCK
    text = gzip.decompress(data_path("persuasion.txt.gz").read_bytes()).decode("utf-8")
    ids = tokenizer(text[: CHARACTERS_PER_TOKEN * tokens], add_special_tokens=False, verbose=False).input_ids
    return torch.tensor([ids[:count]], device=model.device)


@torch.inference_mode()
def capture(model: Any, ids: torch.Tensor, queries: int) -> Capture:
    """Prefill ``ids [1, T]`` and keep the states of every layer, with the last ``queries`` of each."""
    with capture_queries(model) as asked:
        updates = record(model, ids)
    natives = native_layers(model.config)
    layers = [
        _states(update, replace(each, query=each.query[:, :, -queries:]))
        for update, each in zip(updates, asked, strict=True)
        if is_full_attention(natives[update.layer])
    ]
    return Capture(updates, layers)


def _states(update: Update, queries: Queries) -> LayerStates:
    pending, raw = update.pending, None
    if pending is not None and pending.layout is not None and pending.layout.slot == "key":
        raw, (cos, sin) = update.keys.float().clone(), pending.tables
        pending.layout.unrotate_(raw, cos[:, None].float(), sin[:, None].float())
    return LayerStates(update.layer, update.keys.float(), update.values.float(), raw, queries)


@torch.inference_mode()
def store(model_config: Any, config: KVQuantConfig, captured: Capture) -> Stored:
    """Fill a cache of this format with the capture and read it back; everything behind the sinks is quantized."""
    cache = replay(QuantizedKVCache(model_config, replace(config, residual_length=0)), captured.updates)
    states = read_back(cache, captured.updates)
    chosen = [each.index for each in captured.layers]
    ours = [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]
    return Stored(
        [states[index][0].float() for index in chosen],
        [states[index][1].float() for index in chosen],
        _bits([layer.key_state for layer in ours], ours),
        _bits([layer.value_state for layer in ours], ours),
    )


def _bits(states: Sequence[Any], layers: Sequence[QuantizedLayer]) -> float:
    """Bits per element in closed blocks, of codes, scales, zero points and the tables of the row."""
    held = sum(storage_nbytes(tensors_in([state.packed.held, state.tables])) for state in states)
    tokens = [sum(sum(row.blocks) for row in layer.rows) for layer in layers]
    elements = sum(
        count * state.window.shape[1] * state.window.shape[3] for count, state in zip(tokens, states, strict=True)
    )
    return 8 * held / elements


@torch.inference_mode()
def key_errors(queries: Sequence[Queries], stored: Sequence[torch.Tensor]) -> dict[str, float]:
    """Errors of stored keys ``[1, K, T, D]`` of some layers.

    ``relative``: RMS of the error over RMS of the keys. ``score``: RMS of the change of ``q . k * scaling`` over causal
    pairs. ``kl``: KL(exact, stored) of the attention probabilities in nats, mean over heads and queries. All over the
    layers given.
    """
    errors = [other - exact.keys.float() for exact, other in zip(queries, stored, strict=True)]
    norm = sum(float(each.keys.float().square().sum()) for each in queries)
    scores = [score_changes(each, error).square().mean().item() for each, error in zip(queries, errors, strict=True)]
    divergences = [
        kl(each.log_attention(), each.log_attention(other)).item() for each, other in zip(queries, stored, strict=True)
    ]
    return {
        "relative": (sum(float(each.square().sum()) for each in errors) / norm) ** 0.5,
        "score": (sum(scores) / len(scores)) ** 0.5,
        "kl": sum(divergences) / len(divergences),
    }


def score_changes(queries: Queries, error: torch.Tensor) -> torch.Tensor:
    """What an error of the keys ``[1, K, T, D]`` adds to each score of a causal pair, all heads in one vector."""
    query = queries.query.float().unflatten(1, (error.shape[1], -1))
    changes = query @ error[:, :, None].transpose(-1, -2) * queries.scaling
    seen = torch.ones(changes.shape[-2:], dtype=torch.bool, device=error.device).tril(
        changes.shape[-1] - query.shape[3]
    )
    return changes[..., seen].flatten()


@torch.inference_mode()
def value_errors(
    queries: Sequence[Queries], exact: Sequence[torch.Tensor], stored: Sequence[torch.Tensor]
) -> dict[str, float]:
    """Errors of stored values ``[1, K, T, Dv]`` of some layers, attended to with exact probabilities.

    ``relative``: RMS of the error over RMS of the values. ``output``: the same of the attention output before its
    projection.
    """
    error, norm, output_error, output_norm = 0.0, 0.0, 0.0, 0.0
    for each, values, other in zip(queries, exact, stored, strict=True):
        probabilities = each.log_attention().exp()
        error += float((other - values).square().sum())
        norm += float(values.square().sum())
        output_error += float((probabilities @ (other - values)[:, :, None]).square().sum())
        output_norm += float((probabilities @ values[:, :, None]).square().sum())
    return {"relative": (error / norm) ** 0.5, "output": (output_error / output_norm) ** 0.5}

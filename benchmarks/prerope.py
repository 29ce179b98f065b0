"""Keys before against after RoPE, per channel: error of stored keys, error of attention scores, and what it costs.

``python -m benchmarks.prerope``: SmolLM2 reads 1,024 tokens of Persuasion; the keys it hands to the cache and the
queries that meet them are kept. Every key format then stores the same keys with and without un-rotation (no window, 4
sinks, groups of 64 tokens), through the real cache layer:

- ``key_error``: relative RMS of the keys read back, over layers and heads;
- ``score_error``: RMS of the change of q.k / sqrt(D) over causal pairs, queries of the last 256 tokens, all heads;
- ``read_ratio``, ``close_ratio``: time before RoPE / after RoPE of reading 8,192 tokens and of closing a block, one
  layer, interleaved, medians.
"""

from __future__ import annotations

import gzip
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import (
    DTYPES,
    describe_run,
    head_lines,
    make_parser,
    markdown_table,
    write_report,
)
from benchmarks.replay import record
from hf_kvquant import KVQuantConfig, TensorSpec
from hf_kvquant.demo import data_path, load_model
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.rotary import LayerRotary, RotaryLayout, RotaryTable

FORMATS = ("int8", "int4", "int3", "int2")
QUERIES = 256


def capture(model: Any, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Rotated keys and queries of every layer ``[1, K or H, T, D]``, and the tables cos, sin ``[1, T, D/2]``."""
    updates = record(model, ids)
    first = updates[0].pending
    assert first is not None
    queries = [each.pending.queries(0, ids.shape[1]) for each in updates if each.pending is not None]
    return [each.keys for each in updates], [q for q in queries if not isinstance(q, str)], *first.tables


def make_layer(fmt: str, pre_rope: bool, cos: torch.Tensor, sin: torch.Tensor) -> QuantizedLayer:
    layer = QuantizedLayer(KVQuantConfig(TensorSpec(fmt), TensorSpec("none", "token"), 0, 4, pre_rope))
    if pre_rope:
        table = RotaryTable.empty_like(cos, 0, layer.block_length)
        table.append(cos, sin)
        layer.set_rotary(LayerRotary(RotaryLayout("key", "half", cos.shape[-1], 0, 1, "single", False), table))
    return layer


def errors(fmt: str, pre_rope: bool, captured: Any) -> dict[str, float]:
    keys, queries, cos, sin = captured
    key_error, key_norm, score_error, pairs = 0.0, 0.0, 0.0, 0
    for exact, query in zip(keys, queries, strict=True):
        layer = make_layer(fmt, pre_rope, cos, sin)
        layer.update(exact, exact)
        stored = layer.materialize()[0]
        difference = stored - exact
        key_error += float(difference.square().sum())
        key_norm += float(exact.square().sum())
        spread = difference.repeat_interleave(query.shape[1] // exact.shape[1], 1)
        scores = query[:, :, -QUERIES:] @ spread.transpose(-1, -2) / exact.shape[-1] ** 0.5
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - QUERIES)
        score_error += float(scores.square().masked_fill(~causal, 0).sum())
        pairs += int(causal.sum()) * scores.shape[1]
    return {"key_error": (key_error / key_norm) ** 0.5, "score_error": (score_error / pairs) ** 0.5}


def cost(fmt: str, rounds: int) -> dict[str, float]:
    """Ratios of reading 8,192 tokens and of closing one block, before to after RoPE, SmolLM2's shape."""
    angles = torch.rand(1, 8192 + 68, 32) * 6
    states = torch.randn(1, 3, 8192, 64)
    layers = [make_layer(fmt, pre_rope, angles.cos(), angles.sin()) for pre_rope in (True, False)]
    for layer in layers:
        layer.update(states, states)
    reads = _ratio([layer.materialize for layer in layers], rounds)
    block = torch.randn(1, 3, 64, 64)
    closings = [lambda state=each.key_state: state.close(block, slice(None), 4, 0, 64, 1) for each in layers]
    return {"read_ratio": reads, "close_ratio": _ratio(closings, rounds)}


def _ratio(functions: list[Callable[[], Any]], rounds: int) -> float:
    ratios = []
    for _ in range(rounds):
        seconds = []
        for function in functions:
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios[1:])


def main() -> None:
    parser = make_parser("prerope", "Keys stored before against after RoPE.", FORMATS, FORMATS)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model, DTYPES[options.dtype])
    text = gzip.decompress(data_path("persuasion.txt.gz").read_bytes()).decode("utf-8")
    ids = torch.tensor([tokenizer(text, add_special_tokens=False, verbose=False).input_ids[: options.tokens]])
    report = describe_run("prerope", {"tokens": options.tokens, "dtype": options.dtype, "rounds": options.rounds})
    with torch.inference_mode():
        captured = capture(model, ids)
        rows = [
            {"format": fmt, "pre_rope": pre} | errors(fmt, pre, captured)
            for fmt in options.schemes
            for pre in (False, True)
        ]
        report |= {"skipped": {}, "rows": rows, "cost": {fmt: cost(fmt, options.rounds) for fmt in options.schemes}}
    write_report(report, [*head_lines(report), *markdown_table(HEAD, table_rows(report))], options.json)


HEAD = [
    "keys",
    "error after RoPE",
    "before",
    "score error after RoPE",
    "before",
    "reading, time before / after",
    "closing",
]


def table_rows(report: dict[str, Any]) -> list[list[str]]:
    found = {(row["format"], row["pre_rope"]): row for row in report["rows"]}
    return [
        [fmt]
        + [f"{found[fmt, pre][name]:.3f}" for name in ("key_error", "score_error") for pre in (False, True)]
        + [f"{cost[name]:.2f}" for name in ("read_ratio", "close_ratio")]
        for fmt, cost in report["cost"].items()
    ]


if __name__ == "__main__":
    main()

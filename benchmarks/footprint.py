"""What our caches hold, in bytes, at given numbers of tokens.

Decision: bytes do not depend on what the states say, so caches are filled with random bf16 states of the model's shape,
in one prompt, and every figure is ``memory_report()`` of a real cache; nothing is scaled from another dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.common import append, markdown_table, random_states
from hf_kvquant import PRESETS, KVQuantConfig, QuantizedKVCache
from hf_kvquant.presets import DEFAULT_PRESET

RATIO_LIMIT, RATIO_TOKENS = 0.31, 2000
LENGTHS = (500, 1000, 1500, RATIO_TOKENS, 3000, 4000, 8000)
SEARCH_STEP, SEARCH_END = 16, 6144
RESIDUAL_LENGTHS = (128, 64)


def measure_footprint(model_config: Any, presets: list[str], tokens: int, steps: int) -> dict[str, Any]:
    """Per preset after a prompt and after further steps; and the default preset with each window by length."""
    default = PRESETS[DEFAULT_PRESET].config
    windows = {window: dataclasses.replace(default, residual_length=window) for window in RESIDUAL_LENGTHS}
    return {
        "dtype": "torch.bfloat16",
        "presets": [
            {"preset": name, "further_steps": further} | held(model_config, PRESETS[name].config, tokens, further)
            for name in presets
            for further in (0, steps)
        ],
        "windows": [
            {"residual_length": window} | held(model_config, config, length)
            for window, config in windows.items()
            for length in LENGTHS
        ],
        "ratio_limit": RATIO_LIMIT,
        "first_tokens_within_limit": {str(w): first_within(model_config, config) for w, config in windows.items()},
    }


def held(
    model_config: Any, config: KVQuantConfig, tokens: int, further: int = 0, layers: int | None = None
) -> dict[str, Any]:
    """What a cache holds after a prompt of ``tokens`` and ``further`` single tokens."""
    cache = QuantizedKVCache(model_config, config)
    append(cache, random_states(model_config, tokens, torch.bfloat16, layers=layers))
    step = random_states(model_config, 1, torch.bfloat16, layers=layers)
    for _ in range(further):
        append(cache, step)
    report = cache.memory_report()
    return {
        "tokens": tokens + further,
        "nbytes": report.total,
        "full_precision_nbytes": report.full_precision_nbytes,
        "ratio": report.ratio,
        "bits_per_element": report.bits_per_element,
        "packed_bits_per_element": report.packed_bits_per_element,
        "unused_nbytes": report.sum.unused,
    }


def first_within(model_config: Any, config: KVQuantConfig) -> int | None:
    """The prompt length from which on the ratio stays within the limit; all layers are alike, so one is filled."""
    first = None
    for tokens in range(SEARCH_STEP, SEARCH_END + 1, SEARCH_STEP):
        if held(model_config, config, tokens, layers=1)["ratio"] > RATIO_LIMIT:
            first = None
        elif first is None:
            first = tokens
    return first


def footprint_lines(memory: dict[str, Any]) -> list[str]:
    """The figures in Markdown."""
    presets = [
        [row["preset"], f"{row['tokens']} ({row['further_steps']} steps)", *_cells(row)] for row in memory["presets"]
    ]
    windows = [[str(row["residual_length"]), str(row["tokens"]), *_cells(row)] for row in memory["windows"]]
    figures = ["bytes", "/ bf16", "bits/element", "without window", "unused bytes"]
    lines = ["Bytes of caches filled in bf16:", *markdown_table(["preset", "tokens", *figures], presets)]
    lines += [
        "The default preset by window (residual_length):",
        *markdown_table(["window", "tokens", *figures], windows),
    ]
    for window, tokens in memory["first_tokens_within_limit"].items():
        where = f"from {tokens} tokens on" if tokens else f"nowhere up to {SEARCH_END} tokens"
        lines.append(f"- window {window}: within {RATIO_LIMIT} of bf16 {where} (prompts in steps of {SEARCH_STEP})")
    return lines


def _cells(row: dict[str, Any]) -> list[str]:
    bits = [f"{row['bits_per_element']:.2f}", f"{row['packed_bits_per_element']:.2f}"]
    return [f"{row['nbytes']:,}", f"{row['ratio']:.3f}", *bits, f"{row['unused_nbytes']:,}"]

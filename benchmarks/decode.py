"""Time of one decode step with each cache over full tensors, side by side: ``python -m benchmarks.decode``.

Decisions:
- Caches are filled with random states through ``update``, layer by layer: how long codes take to read does not depend
  on what they say, and a real prefill of 8k tokens per scheme would take most of the run.
- All caches grow in lockstep: each gets the same states and the same steps at the same positions, 128 tokens a round,
  and the rounds lie symmetrically about T. At each position the schemes are timed one after the other, in rotating
  order; a ratio is the median of the ratios at equal positions, so that what slows the machine for a while slows both.
- Steps that close a block (ours) or flush the window (transformers) are known beforehand from a walk on one layer and
  are timed apart. The tokens between timed steps are appended without running the model.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache
from transformers.cache_utils import QuantizedLayer

from benchmarks.common import (
    DTYPES,
    DYNAMIC,
    QUANTO,
    Scheme,
    append,
    choose_schemes,
    describe_run,
    forward,
    load_average,
    make_parser,
    random_states,
    write_report,
)
from benchmarks.decode_summary import CYCLE, Sample, check_targets, summarize, to_markdown
from hf_kvquant import PRESETS, QuantizedKVCache
from hf_kvquant.models import load_model

ORDINARY = (32, 96)  # positions timed in every round whatever closes
DEFAULT_SCHEMES = (DYNAMIC, "static", QUANTO, "transformers-hqq4", "transformers-fp8", "k4v4", "int8")


def over_full_tensors(scheme: Scheme) -> Scheme:
    """Our caches with attention over full tensors: what it costs to read them. ``benchmarks.attention`` measures
    attention over codes."""
    if scheme.name not in PRESETS:
        return scheme
    return replace(scheme, build=lambda config, length: QuantizedKVCache(config, scheme.name, backend="full"))


def closed_size(cache: Cache) -> int:
    """Something that changes exactly when tokens of the first layer become codes."""
    if isinstance(cache, QuantizedKVCache):
        return cache.memory_report().layers[0].codes
    layer = cache.layers[0]
    if not isinstance(layer, QuantizedLayer):
        return 0
    assert layer.keys is not None
    return int(layer.get_seq_length()) - (layer.keys.shape[-2] if layer.keys.dim() == 4 else 0)


def find_closings(scheme: Scheme, config: Any, start: int, dtype: torch.dtype) -> list[int]:
    """Offsets in a cycle at which a cache first filled with ``start`` tokens closes a block or flushes its window."""
    cache = scheme.build(config, start + CYCLE)
    append(cache, random_states(config, start, dtype, layers=1))
    token = random_states(config, 1, dtype, layers=1)
    sizes = [closed_size(cache)]
    for _ in range(CYCLE):
        append(cache, token)
        sizes.append(closed_size(cache))
    return [offset for offset in range(CYCLE) if sizes[offset] != sizes[offset + 1]]


def timed_offsets(closings: dict[str, list[int]]) -> list[int]:
    """Every closing of any scheme, the step before it, and two more."""
    events = {offset for offsets in closings.values() for offset in offsets}
    return sorted(events | {offset - 1 for offset in events if offset} | set(ORDINARY))


def timed_step(model: Any, token: torch.Tensor, cache: Cache) -> dict[str, float]:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    forward(model, token, cache)
    return {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - begin_cpu}


def run_round(
    model: Any, caches: dict[str, Cache], offsets: list[int], closings: dict[str, list[int]], number: int
) -> list[Sample]:
    """One cycle: the timed steps at ``offsets``, everything between them appended."""
    token = torch.tensor([[number + 1]], device=model.device)
    names, position, samples = list(caches), 0, []
    for turn, offset in enumerate([*offsets, CYCLE]):
        if offset > position:
            states = random_states(model.config, offset - position, model.dtype, seed=CYCLE * number + position)
            for cache in caches.values():
                append(cache, states)
        if offset == CYCLE:
            break
        shift = (turn + number) % len(names)
        for name in names[shift:] + names[:shift]:
            place = {"round": number, "offset": offset, "scheme": name, "closes": offset in closings[name]}
            samples.append(place | timed_step(model, token, caches[name]))
        position = offset + 1
    return samples


def measure(model: Any, schemes: list[Scheme], length: int, rounds: int, bar: tqdm) -> tuple[dict, list[Sample]]:
    """Closings per scheme and all samples of one length."""
    start = length - rounds * CYCLE // 2
    if start < 1:
        raise ValueError(f"--lengths {length}: too short for --rounds {rounds}; at least {rounds * CYCLE // 2 + 1}")
    closings = {s.name: find_closings(s, model.config, start, model.dtype) for s in schemes}
    caches = {s.name: s.build(model.config, start + rounds * CYCLE + 2) for s in schemes}
    states = random_states(model.config, start, model.dtype)
    for name, cache in caches.items():
        bar.set_postfix_str(f"T={length} filling {name}")
        append(cache, states)
    del states
    samples = []
    for number in range(rounds):
        bar.set_postfix_str(f"T={length}")
        samples += run_round(model, caches, timed_offsets(closings), closings, number)
        bar.update(1)
    return closings, samples


def run(
    model: Any,
    names: list[str],
    lengths: list[int],
    rounds: int,
    threads: list[int],
    path: Path,
) -> dict[str, Any]:
    """Measure, write the report and return it."""
    chosen, skipped = choose_schemes(names, model.config)
    schemes = [over_full_tensors(scheme) for scheme in chosen]
    settings = {"lengths": lengths, "rounds": rounds, "threads": threads, "dtype": str(model.dtype)}
    report = describe_run("decode", {**settings, "attention": model.config._attn_implementation})
    report |= {"skipped": skipped, "cells": [], "samples": []}
    before = torch.get_num_threads()
    try:
        with (
            torch.inference_mode(),
            tqdm(total=len(threads) * len(lengths) * rounds, unit="round", disable=None) as bar,
        ):
            for count in threads:
                torch.set_num_threads(count)
                for length in lengths:
                    place = {"threads": count, "tokens": length}
                    closings, samples = measure(model, schemes, length, rounds, bar)
                    report["cells"] += [place | summarize(samples, s.name, closings[s.name]) for s in schemes]
                    report["samples"] += [place | sample for sample in samples]
    finally:
        torch.set_num_threads(before)
    report["machine"]["load_average_at_end"] = load_average()
    report["targets"] = check_targets(report["cells"])
    write_report(report, to_markdown(report), path)
    return report


def main() -> None:
    parser = make_parser("decode", "Time of one decode step with each cache, side by side.", DEFAULT_SCHEMES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8192], metavar="T")
    parser.add_argument("--rounds", type=int, default=3, help=f"rounds of {CYCLE} tokens per length (default: 3)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    options = parser.parse_args()
    model, _ = load_model(options.model, DTYPES[options.dtype])
    run(model, options.schemes, options.lengths, options.rounds, options.threads, options.json)


if __name__ == "__main__":
    main()

"""The log of what was tried on keys and values before the presets were settled: ``python -m benchmarks.variants``.

Keys alone, or values alone, are stored in a variant and the other tensor is left exact, on development samples of
``benchmarks.quality`` (seed 1, first halves of the novels): 16 needle questions, 4 copies, 4 passages; no window, 4
sinks.
Copies are few and vary: differences below a third of the copy column mean little. ``attention`` is the KL of attention
probabilities on the passages, which varies least.

``benchmarks.quality`` judges what was chosen, on other text. 8 minutes on one core.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.common import describe_run, head_lines, make_parser, markdown_table, write_report
from benchmarks.quality import Reference, feed, kl, read_sample
from benchmarks.quality_schemes import CONFIGS
from benchmarks.replay import Update, holding, read_back, replay
from benchmarks.samples import SETS, Sample, build_samples
from hf_kvquant import PRESETS, KVQuantConfig, QuantizedKVCache, TensorSpec
from hf_kvquant.models import load_model

SEED = 1
FIRST_MEASURED = {"cm3": ((8, 4), (4, 32), (2, 16), (0, 12)), "cm2": ((4, 20), (2, 24), (0, 20))}
PROFILES = {
    "cm3": (
        ((6, 8), (4, 28), (2, 16), (0, 12)),
        ((4, 32), (2, 32)),
        ((6, 4), (4, 26), (2, 32), (0, 2)),
        ((5, 8), (4, 20), (3, 20), (2, 4), (1, 4), (0, 8)),
        ((6, 8), (4, 16), (3, 16), (2, 16), (0, 8)),
        ((6, 16), (4, 12), (2, 24), (0, 12)),
        ((6, 12), (4, 18), (2, 24), (0, 10)),
    ),
    "cm2": (
        ((4, 16), (2, 28), (1, 8), (0, 12)),
        ((4, 12), (2, 40), (0, 12)),
        ((6, 4), (4, 12), (2, 28), (0, 20)),
        ((5, 8), (3, 16), (2, 20), (0, 20)),
        ((6, 8), (4, 8), (2, 24), (0, 24)),
    ),
}
Queries = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # queries [1, H, n, D] and keys [1, K, n, D] -> queries


@dataclass(frozen=True)
class Variant:
    name: str
    config: KVQuantConfig
    part: str = "keys"
    queries: Queries | None = None


def with_widths(preset: str, widths: tuple[tuple[int, int], ...]) -> KVQuantConfig:
    config = PRESETS[preset].config
    return replace(config, key=replace(config.key, format=f"midrise{widths[0][0]}", widths=widths))


def attention_mass(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Queries scaled so that their energy counts by what moves attention: the mass on keys that are not exact sinks,
    less that of a single one (an error common to all moves nothing)."""
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    scores = grouped @ keys[:, :, None].mT * queries.shape[-1] ** -0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    seen = scores.masked_fill(future, -torch.inf).softmax(-1)[..., 4:]
    return queries * (seen.sum(-1) - seen.square().sum(-1)).sqrt().flatten(1, 2)[..., None]


def variants() -> list[Variant]:
    presets = {name: CONFIGS[name] for name in ("k4v4", "k3v3", "had4", "cr4", "cm3", "cm2")}
    found = [Variant(name, config) for name, config in presets.items()]
    unbalanced = replace(presets["cr4"], key=replace(presets["cr4"].key, normalize=False))
    for bits in (4, 3, 2):
        for name, config in (("balanced", presets["cr4"]), ("not balanced", unbalanced)):
            spec = replace(config.key, format=f"midrise{bits}")
            found.append(Variant(f"centre + Hadamard, {bits} bits, {name}", replace(config, key=spec)))
    found.append(Variant("cr4, before RoPE", replace(presets["cr4"], pre_rope=True)))
    for name, own in FIRST_MEASURED.items():
        first = with_widths(name, own)
        found += [
            Variant(f"{name}, first profile {own}", first),
            Variant(
                f"{name}, first profile, no queries", first, queries=lambda queries, keys: torch.ones_like(queries)
            ),
            Variant(f"{name}, first profile, queries by attention mass", first, queries=attention_mass),
            Variant(f"{name}, first profile, before RoPE", replace(first, pre_rope=True)),
            *(
                Variant(f"{name}, first profile, statistics of {n}", replace(first, calibration_length=n))
                for n in (256, 512)
            ),
            *(Variant(f"{name}, profile {widths}", with_widths(name, widths)) for widths in PROFILES[name]),
            Variant(f"{name}, tuned by layer", CONFIGS[f"{name}-tuned"]),
        ]
    found.append(Variant("4 bits, tuned by layer", CONFIGS["cm4-tuned"]))
    for bits in (4, 3, 2):
        rotated = replace(presets["cr4"].value, format=f"midrise{bits}")
        ways = {
            "rotated": rotated,
            "rotated and centred": replace(rotated, center="plain"),
            "rotated, 1/16 octave": replace(rotated, scale_format="log2_16"),
            "min-max per token": TensorSpec(f"int{bits}", "token"),
        }
        found += [
            Variant(f"values, {bits} bits, {name}", replace(presets["cr4"], value=spec), "values")
            for name, spec in ways.items()
        ]
    return found


def with_queries(updates: list[Update], change: Queries | None) -> list[Update]:
    """The same updates, their queries seen through ``change``."""
    if change is None:
        return updates

    def changed(each: Update) -> Update:
        assert each.pending is not None
        ask = each.pending.queries

        def queries(start: int, stop: int) -> torch.Tensor | str:
            found = ask(0, stop)
            return found if isinstance(found, str) else change(found, each.keys[:, :, :stop])[:, :, start:]

        return dataclasses.replace(each, pending=dataclasses.replace(each.pending, queries=queries))

    return [changed(each) for each in updates]


def measure(model: Any, variant: Variant, sample: Sample, reference: Reference) -> tuple[list[float], list[float]]:
    """KL of each probe, and of attention by layer where queries were kept and keys are coded."""
    cache = QuantizedKVCache(model.config, replace(variant.config, residual_length=0))
    read = read_back(replay(cache, with_queries(reference.updates, variant.queries)), reference.updates)
    keys_only = variant.part == "keys"
    states = [
        (keys, each.values) if keys_only else (each.keys, values)
        for (keys, values), each in zip(read, reference.updates, strict=True)
    ]
    holder = holding(model.config, states)
    found = [
        float(kl(full, feed(model, holder, probe)))
        for full, probe in zip(reference.log_probs, sample.probes, strict=True)
    ]
    seen = zip(reference.attention, reference.queries, states, strict=True) if reference.queries and keys_only else ()
    return found, [float(kl(exact, queries.log_attention(keys))) for exact, queries, (keys, _) in seen]


def main() -> None:
    options = make_parser("variants", "What was tried before the presets were settled.", [], []).parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    samples = [each for each in build_samples(tokenizer, SEED) if each.kind == "copy" or each.name[-1] in "01"]
    tried = variants()
    probes: dict[str, dict[str, list[float]]] = {each.name: {kind: [] for kind in SETS} for each in tried}
    attention: dict[str, list[list[float]]] = {each.name: [] for each in tried}
    with torch.inference_mode(), tqdm(total=len(samples) * len(tried), disable=None) as bar:
        for sample in samples:
            reference = read_sample(model, sample)
            for variant in tried:
                found, layers = measure(model, variant, sample, reference)
                probes[variant.name][sample.kind] += found
                attention[variant.name] += [layers] if layers else []
                bar.update(1)
    rows = []
    for variant in tried:
        layers = [fmean(layer) for layer in zip(*attention[variant.name], strict=True)]
        row: dict[str, Any] = {"variant": variant.name, "part": variant.part}
        row |= {kind: fmean(values) for kind, values in probes[variant.name].items()}
        rows.append(row | {"attention": fmean(layers) if layers else None, "worst_layer": max(layers, default=None)})
    report = describe_run("variants", {"seed": SEED, "samples": [s.name for s in samples]}) | {
        "skipped": {},
        "rows": rows,
    }
    cells = [["-" if v is None else v if isinstance(v, str) else f"{v:.2g}" for v in row.values()] for row in rows]
    head = ["variant", "part", *(f"{kind} KL" for kind in SETS), "attention KL", "worst layer"]
    write_report(report, [*head_lines(report), *markdown_table(head, cells)], options.json)


if __name__ == "__main__":
    main()

"""What each format costs in quality, against the bits that it takes: ``python -m benchmarks.quality``.

Full precision against every preset, other ways to spend the same bits, and transformers' 4-bit caches, on the samples
of ``benchmarks.samples``: hidden numbers, copied digits, running text.

Decisions:
- The real cache runs: a context goes into it, is quantized, and what attention would read is what the probe meets. One
  prefill of the model serves all caches (``benchmarks.replay``).
- A probe is fed as one chunk, its own keys and values exact: the loss is that of the quantized past alone. Single steps
  of generation, which quantize the newest tokens too, are the subject of ``benchmarks.agreement``.
- KL(full precision, quantized) per scored token ranks the formats: it is much less noisy than the likelihood of the
  right answer or exact matches, which are given as well, as paired differences with their standard errors.
- Attention KL takes full precision's queries, so that each layer is judged by its own keys only.
- Results are kept per scheme, window and sample as soon as they are there, under a key of everything they depend on
  but the code: an interrupted run goes on, a new format costs only its own time, ``--fresh`` forgets all.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache

from benchmarks import samples as sample_sets
from benchmarks.common import DTYPES, RESULTS, describe_run, make_parser
from benchmarks.quality_plot import draw
from benchmarks.quality_schemes import NAMES, Candidate, known, runnable
from benchmarks.quality_summary import averages, check_targets, to_markdown
from benchmarks.replay import Queries, Update, capture_queries, exact_states, holding, read_back, record, replay
from benchmarks.samples import SETS, Probe, Sample, build_samples
from hf_kvquant._compat import cache_argument
from hf_kvquant.models import load_model
from hf_kvquant.schemes import bits_held


@dataclass(frozen=True)
class Reference:
    """Full precision on one sample."""

    updates: list[Update]
    log_probs: list[torch.Tensor]
    queries: list[Queries]
    attention: list[torch.Tensor]


def read_sample(model: Any, sample: Sample) -> Reference:
    """Prefill once, and feed the probes; queries are kept for running text only, where attention is judged."""
    updates = record(model, torch.tensor([sample.context], device=model.device))
    cache = holding(model.config, exact_states(updates))
    if sample.kind != "text":
        return Reference(updates, [feed(model, cache, probe) for probe in sample.probes], [], [])
    with capture_queries(model) as queries:
        log_probs = [feed(model, cache, probe) for probe in sample.probes]
    return Reference(updates, log_probs, queries, [each.log_attention() for each in queries])


def feed(model: Any, cache: Cache, probe: Probe) -> torch.Tensor:
    """Log-probabilities ``[scored, V]`` at the scored tokens; the cache is left as it was."""
    ids = torch.tensor([probe.ids[:-1]], device=model.device)
    argument = {cache_argument(model.forward): cache}
    logits = model(input_ids=ids, use_cache=True, logits_to_keep=probe.scored, **argument).logits[0]
    cache.crop(-ids.shape[1])
    return logits.float().log_softmax(-1)


def measure(model: Any, candidate: Candidate, sample: Sample, reference: Reference, weigh: bool) -> dict[str, Any]:
    """One result: a scheme with one window on one sample; ``weigh``: count its bits as well."""
    start = time.perf_counter()
    states = read_back(replay(candidate.build(model.config), reference.updates), reference.updates)
    cache = holding(model.config, states)
    probes = [
        compare(full, feed(model, cache, probe), probe)
        for full, probe in zip(reference.log_probs, sample.probes, strict=True)
    ]
    seen = zip(reference.attention, reference.queries, states, strict=True) if reference.queries else ()
    attention = [rounded(kl(exact, queries.log_attention(keys))) for exact, queries, (keys, _) in seen]
    result = {"probes": probes, "attention_kl": attention, "seconds": round(time.perf_counter() - start, 2)}
    return result | ({"bits": weigh_cache(model.config, candidate, reference.updates)} if weigh else {})


def weigh_cache(config: Any, candidate: Candidate, updates: list[Update]) -> dict[str, Any]:
    halves = [each.to(torch.bfloat16) for each in updates]
    elements = sum(each.keys.numel() + each.values.numel() for each in halves)
    return bits_held(replay(candidate.build(config), halves), elements)


def compare(full: torch.Tensor, log_probs: torch.Tensor, probe: Probe) -> dict[str, float]:
    """Of the scored tokens of one probe: mean KL, mean negative log-likelihood, share predicted right."""
    right = torch.tensor(probe.ids[-probe.scored :], device=full.device)[:, None]
    result = {"kl": rounded(kl(full, log_probs))}
    for suffix, each in (("", log_probs), ("_full", full)):
        result["nll" + suffix] = rounded(-each.gather(1, right).mean())
        result["accuracy" + suffix] = rounded((each.argmax(-1, keepdim=True) == right).float().mean())
    return result


def kl(full: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(full, other) of log-probabilities over the last dimension, in nats, averaged over all others; what is
    impossible in both counts nothing."""
    difference = torch.where(full == -torch.inf, 0.0, full - other)
    return (full.exp() * difference).sum(-1).mean()


def rounded(value: torch.Tensor) -> float:
    return float(f"{value.item():.6g}")


class Store:
    """The results in one JSON file, rewritten by a rename after each of them; one line per result."""

    def __init__(self, path: Path, fresh: bool = False):
        self.path = path
        stored = json.loads(path.read_text()).get("rows", []) if path.exists() and not fresh else []
        self.rows: dict[str, dict[str, Any]] = {row["key"]: row for row in stored}

    def add(self, key: str, row: dict[str, Any], head: dict[str, Any]) -> None:
        self.rows[key] = {"key": key} | row
        self.write(head)

    def keep(self, keys: set[str]) -> None:
        """Drop results of schemes, samples or settings that are no more."""
        self.rows = {key: row for key, row in self.rows.items() if key in keys}

    def write(self, head: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(row) for row in self.rows.values())
        scratch = self.path.with_suffix(".partial")
        scratch.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n]}}\n')
        os.replace(scratch, self.path)


@dataclass(frozen=True)
class Run:
    """A run in progress. ``settings``: what results depend on besides scheme and sample."""

    model: Any
    settings: dict[str, Any]
    store: Store
    report: dict[str, Any]

    def measure_sample(self, sample: Sample, chosen: list[Candidate], weigh: bool, bar: tqdm) -> None:
        """What is not stored yet of one sample."""
        todo = [each for each in chosen if each.key(sample.name, self.settings) not in self.store.rows]
        bar.update(len(chosen) - len(todo))
        if not todo:
            return
        bar.set_postfix_str(f"{sample.name}: full precision")
        reference = read_sample(self.model, sample)
        for each in todo:
            bar.set_postfix_str(f"{sample.name}: {each.scheme} {each.window}")
            if each.scheme not in self.report["skipped"]:
                self._measure(each, sample, reference, weigh)
            bar.update(1)

    def _measure(self, each: Candidate, sample: Sample, reference: Reference, weigh: bool) -> None:
        try:
            row = measure(self.model, each, sample, reference, weigh)
        except Exception as error:  # one broken format must not cost the results of all others
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self.report["skipped"][each.scheme] = f"failed on {sample.name}, {each.window}: {reason}"
            return
        names = {"scheme": each.scheme, "window": each.window, "sample": sample.name, "tokens": len(sample.context)}
        self.store.add(each.key(sample.name, self.settings), names | row, self.report)


def run(
    model: Any,
    samples: list[Sample],
    schemes: list[str],
    path: Path,
    settings: dict[str, Any],
    *,
    sets: tuple[str, ...] = SETS,
    fresh: bool = False,
) -> dict[str, Any]:
    """Measure what is not stored yet of the chosen schemes and sets; report all that is, and return the report."""
    chosen, skipped = runnable(schemes, model.config)
    report = describe_run("quality", settings | {"threads": torch.get_num_threads()}) | {"skipped": skipped}
    store = Store(path, fresh)
    store.keep({each.key(s.name, settings) for name in NAMES for each in known(name) for s in samples})
    current, wanted = Run(model, settings, store, report), [each for each in samples if each.kind in sets]
    first_of_length = {len(each.context): each.name for each in reversed(wanted)}  # bits depend on nothing else
    with torch.inference_mode(), tqdm(total=len(chosen) * len(wanted), unit="result", disable=None) as bar:
        for each in wanted:
            current.measure_sample(each, chosen, first_of_length[len(each.context)] == each.name, bar)
    report["averages"] = averages(list(store.rows.values()), samples)
    report["targets"] = check_targets(report["averages"])
    store.write(report)
    text = "\n".join(to_markdown(report)).rstrip() + "\n"
    path.with_suffix(".md").write_text(text)
    print(text)
    draw(report["averages"], path)
    return report


def main() -> None:
    parser = make_parser("quality", "What each format costs in quality, against the bits that it takes.", NAMES, NAMES)
    parser.set_defaults(json=None)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="which samples (default: all)")
    parser.add_argument("--seed", type=int, default=sample_sets.REPORT_SEED, help="0: the report; others: development")
    parser.add_argument("--quick", action="store_true", help="one short sample of each set, for a look")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--fresh", action="store_true", help="forget stored results; needed when the code has changed")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    seed_part, quick_part = f"_seed{options.seed}" if options.seed else "", "_quick" if options.quick else ""
    path = options.json or RESULTS / f"quality{seed_part}{quick_part}.json"
    model, tokenizer = load_model(options.model, DTYPES[options.dtype])
    settings = {"model": options.model, "dtype": options.dtype, "seed": options.seed, "samples": sample_sets.VERSION}
    samples = build_samples(tokenizer, options.seed, options.quick)
    run(model, samples, options.schemes, path, settings, sets=tuple(options.sets), fresh=options.fresh)


if __name__ == "__main__":
    main()

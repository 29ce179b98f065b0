"""How far generation with each cache follows full precision, and its bytes: ``python -m benchmarks.agreement``.

Decisions:
- The prompt's states are computed once, in full precision, and handed to every cache in one ``update``: exactly what a
  one-shot prefill does, since the first update of every cache here hands its input back as it came (checked).
- "one_shot": the prompt's own attention saw exact states, as in ``generate``; only decoding reads codes. "tail": the
  last 64 prompt tokens are a second chunk that reads codes already, as in chunked prefill or a second turn.
- Two batch rows in one pass: row 0 is fed the reference's tokens (teacher forcing), row 1 its own (free running). The
  reference runs as two rows too, so that no difference comes from the batch size.
- The end-of-text token does not stop a continuation: every prompt gives the same number of tokens.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache

from benchmarks.common import (
    DTYPES,
    QUANTO,
    Scheme,
    append,
    choose_schemes,
    describe_run,
    forward,
    head_lines,
    make_parser,
    markdown_table,
    target,
    target_lines,
    write_report,
)
from benchmarks.footprint import RATIO_LIMIT, RATIO_TOKENS, footprint_lines, measure_footprint
from hf_kvquant import PRESETS
from hf_kvquant.models import load_model
from hf_kvquant.presets import UNATTACHED_PRESETS

DATA = Path(__file__).parents[1] / "eval" / "data"
PASSAGES = (
    ("persuasion", 0.1),
    ("persuasion", 0.4),
    ("persuasion", 0.7),
    ("northanger_abbey", 0.25),
    ("northanger_abbey", 0.6),
)
TAIL = 64  # prompt tokens that read codes in the "tail" variant
AGREEMENT_LIMITS = {"k4v4": 0.90, "int8": 0.99}
DEFAULT_SCHEMES = (*UNATTACHED_PRESETS, QUANTO)

States = list[tuple[torch.Tensor, torch.Tensor]]


def read_prompts(tokenizer: Any, tokens: int, count: int) -> list[torch.Tensor]:
    """``count`` prompts [1, tokens], cut from the novels at fixed places, no chat template."""
    prompts = []
    for name, place in PASSAGES[:count]:
        text = gzip.decompress((DATA / f"{name}.txt.gz").read_bytes()).decode("utf-8")
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        start = int(place * len(ids))
        prompts.append(torch.tensor([ids[start : start + tokens]]))
    return prompts


def prefill(model: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, States]:
    """Logits after the prompt and the states of every layer, both as two equal rows."""
    cache = DynamicCache(config=model.config)
    logits = forward(model, prompt, cache)
    layers: list[Any] = list(cache.layers)
    states = [(layer.keys.expand(2, -1, -1, -1), layer.values.expand(2, -1, -1, -1)) for layer in layers]
    return logits.expand(2, -1), states


def fill(cache: Cache, states: States, length: int) -> None:
    """The first ``length`` tokens as a one-shot prefill leaves them; refuses caches that cannot share the prefill."""
    for layer, (keys, values) in enumerate(states):
        given = keys[:, :, :length].contiguous(), values[:, :, :length].contiguous()
        returned = cache.update(*given, layer)
        if not all(torch.equal(r[:, :, :length], g) for r, g in zip(returned, given, strict=True)):
            raise ValueError(f"{type(cache).__name__} changes what the first update returns; prefill it by itself")


def decode(
    model: Any, cache: Cache, logits: torch.Tensor, steps: int, reference: list[int] | None
) -> tuple[torch.Tensor, list[int]]:
    """Logits [steps, V] of the row fed the reference (None: its own tokens), and the free-running tokens."""
    forced, own = [logits[0]], [int(logits[1].argmax())]
    for step in range(steps - 1):
        fed = own[step] if reference is None else reference[step]
        logits = forward(model, torch.tensor([[fed], [own[step]]], device=model.device), cache)
        forced.append(logits[0])
        own.append(int(logits[1].argmax()))
    return torch.stack(forced).float(), own


def compare(forced: torch.Tensor, own: list[int], full: torch.Tensor, reference: list[int]) -> dict[str, Any]:
    """Agreement of one scheme with full precision on one prompt."""
    log_full, log_forced = full.log_softmax(-1), forced.log_softmax(-1)
    same = [a == b for a, b in zip(own, reference, strict=True)]
    return {
        "free_running": mean(same),
        "first_difference": same.index(False) if False in same else None,
        "teacher_forced": (forced.argmax(-1) == full.argmax(-1)).float().mean().item(),
        "kl_nats": (log_full.exp() * (log_full - log_forced)).sum(-1).mean().item(),
    }


def run_prompt(
    model: Any, schemes: list[Scheme], prompt: torch.Tensor, steps: int, tail: int, bar: tqdm
) -> list[dict[str, Any]]:
    """One row per scheme and variant."""
    bar.set_postfix_str("prefill")
    length = prompt.shape[1]
    logits, states = prefill(model, prompt)
    full_cache = DynamicCache(config=model.config)
    append(full_cache, states)
    full, reference = decode(model, full_cache, logits, steps, None)
    rows = []
    for scheme in schemes:
        for variant, exact in (("one_shot", length), ("tail", length - tail)):
            bar.set_postfix_str(f"{scheme.name} {variant}")
            cache = scheme.build(model.config, length + steps)
            fill(cache, states, exact)
            first = logits if variant == "one_shot" else forward(model, prompt[:, exact:].expand(2, -1), cache)
            forced, own = decode(model, cache, first, steps, reference)
            rows.append({"scheme": scheme.name, "variant": variant} | compare(forced, own, full, reference))
            bar.update(1)
    return rows


def average(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the prompts, per scheme and variant."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["scheme"], row["variant"]), []).append(row)
    keys = ("free_running", "teacher_forced", "kl_nats")
    return [
        {"scheme": scheme, "variant": variant, "prompts": len(group)}
        | {key: mean(row[key] for row in group) for key in keys}
        | {"prompts_without_difference": sum(row["first_difference"] is None for row in group)}
        for (scheme, variant), group in groups.items()
    ]


def run(
    model: Any,
    prompts: list[torch.Tensor],
    names: list[str],
    path: Path,
    *,
    steps: int = 64,
    tail: int = TAIL,
) -> dict[str, Any]:
    """Measure, write the report and return it."""
    schemes, skipped = choose_schemes(names, model.config)
    tokens = prompts[0].shape[1]
    settings = {"prompts": len(prompts), "prompt_tokens": tokens, "new_tokens": steps, "tail": tail}
    report = describe_run("agreement", {**settings, "dtype": str(model.dtype), "threads": torch.get_num_threads()})
    report |= {"skipped": skipped, "rows": []}
    with torch.inference_mode(), tqdm(total=2 * len(schemes) * len(prompts), unit="run", disable=None) as bar:
        for number, prompt in enumerate(prompts):
            rows = run_prompt(model, schemes, prompt, steps, tail, bar)
            report["rows"] += [{"prompt": number} | row for row in rows]
    report["averages"] = average(report["rows"])
    report["memory"] = measure_footprint(model.config, [s.name for s in schemes if s.name in PRESETS], tokens, steps)
    report["targets"] = check_targets(report)
    write_report(report, to_markdown(report), path)
    return report


def check_targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    free = {row["scheme"]: row["free_running"] for row in report["averages"] if row["variant"] == "one_shot"}
    targets = [
        target(f"{name}: equal tokens, free running, one_shot", free[name], f">= {limit}", free[name] >= limit)
        for name, limit in AGREEMENT_LIMITS.items()
        if name in free
    ]
    for row in report["memory"]["windows"]:
        if row["tokens"] == RATIO_TOKENS:
            what = f"default preset, window {row['residual_length']}: bytes / bf16 at {RATIO_TOKENS} tokens"
            targets.append(target(what, row["ratio"], f"<= {RATIO_LIMIT}", row["ratio"] <= RATIO_LIMIT))
    return targets


def to_markdown(report: dict[str, Any]) -> list[str]:
    settings = report["settings"]
    rows = [
        [
            row["scheme"],
            row["variant"],
            f"{row['free_running']:.1%}",
            f"{row['prompts_without_difference']}/{row['prompts']}",
            f"{row['teacher_forced']:.1%}",
            f"{row['kl_nats']:.2g}",
        ]
        for row in report["averages"]
    ]
    head = ["cache", "prefill", "free running", "prompts equal", "teacher forced", "KL, nats/token"]
    return [
        *head_lines(report),
        f"{settings['prompts']} prompts of {settings['prompt_tokens']} tokens, {settings['new_tokens']} new ones each,",
        f"greedy, {settings['dtype']}: share of tokens equal to DynamicCache's, averaged over the prompts.",
        *markdown_table(head, rows),
        *footprint_lines(report["memory"]),
        *target_lines(report["targets"]),
    ]


def main() -> None:
    parser = make_parser("agreement", "How far generation with each cache follows full precision.", DEFAULT_SCHEMES)
    parser.add_argument("--prompts", type=int, choices=range(1, len(PASSAGES) + 1), default=len(PASSAGES))
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each prompt (default: 2000)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens generated after each (default: 64)")
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, DTYPES[options.dtype])
    prompts = read_prompts(tokenizer, options.tokens, options.prompts)
    run(model, prompts, options.schemes, options.json, steps=options.new_tokens)


if __name__ == "__main__":
    main()

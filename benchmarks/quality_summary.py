"""What ``benchmarks.quality`` reports of its results: averages with standard errors, targets, Markdown.

Decision: a probe (a question, a copied text, a passage) is one observation; a difference to full precision is taken
per probe and then averaged, so that what makes a probe hard for both cancels out. Averages of a set are given only when
all its samples are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, sqrt
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import head_lines, markdown_table, target, target_lines
from benchmarks.quality_schemes import CLOSED, WINDOW
from benchmarks.samples import SETS, Sample

# Scheme: most true bits, and in which sets its KL must not lie above which scheme's, both closed.
CLAIMS: dict[str, tuple[float, dict[str, str]]] = {
    "cm3": (3.3, {"needle": "k4v4", "copy": "k4v4", "text": "k3v3"}),
    "cm2": (2.3, {"needle": "k3v3", "copy": "k3v3"}),
    "cr4": (4.2, {"needle": "k4v4", "copy": "k4v4", "text": "k4v4"}),
    "cm4": (4.2, {"needle": "k4v4", "copy": "k4v4", "text": "k4v4"}),
    "cm4-tuned": (4.2, {"needle": "k4v4", "copy": "k4v4", "text": "k4v4"}),
    "cm3-tuned": (3.3, {"needle": "k4v4", "copy": "k4v4", "text": "k3v3"}),
    "cm2-tuned": (2.3, {"needle": "k3v3", "copy": "k3v3"}),
}
WINDOW_TEXT_LIMITS = {"cm3": 0.0035, "cm2": 0.012, "cm3-tuned": 0.0035, "cm2-tuned": 0.012}

Average = dict[str, Any]


def mean_and_error(values: Iterable[float]) -> tuple[float, float | None]:
    """Mean and its standard error; no error from a single value."""
    values = list(values)
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def averages(rows: list[dict[str, Any]], samples: list[Sample]) -> list[Average]:
    """One entry per scheme and window, schemes in the order of their bits, most first."""
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["scheme"], row["window"]), {})[row["sample"]] = row
    found = []
    for (scheme, window), by_sample in groups.items():
        weighed = max((row for row in by_sample.values() if "bits" in row), key=lambda r: r["tokens"], default=None)
        average: Average = {"scheme": scheme, "window": window, "bits": weighed and weighed["bits"]}
        average["seconds"] = round(sum(row["seconds"] for row in by_sample.values()), 1)
        for kind in SETS:
            wanted = [each.name for each in samples if each.kind == kind]
            if wanted and all(name in by_sample for name in wanted):
                average[kind] = average_set([by_sample[name] for name in wanted])
        found.append(average)
    return sorted(found, key=lambda each: -each["bits"]["true"] if each["bits"] else 0.0)


def average_set(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of one set: KL, difference of negative log-likelihoods, accuracies, exact matches, attention KL per layer."""
    probes = [probe for row in rows for probe in row["probes"]]
    kl, kl_error = mean_and_error(probe["kl"] for probe in probes)
    difference, error = mean_and_error(probe["nll"] - probe["nll_full"] for probe in probes)
    result: dict[str, Any] = {
        "probes": len(probes),
        "kl": kl,
        "kl_se": kl_error,
        "nll_difference": difference,
        "nll_difference_se": error,
        "perplexity_change": exp(difference) - 1,
    }
    for suffix in ("", "_full"):
        accuracies = [probe["accuracy" + suffix] for probe in probes]
        result |= {"accuracy" + suffix: fmean(accuracies), "exact" + suffix: fmean(a == 1.0 for a in accuracies)}
        result["nll" + suffix] = fmean(probe["nll" + suffix] for probe in probes)
    layers = [row["attention_kl"] for row in rows if row["attention_kl"]]
    return result | ({"attention_kl": [fmean(layer) for layer in zip(*layers, strict=True)]} if layers else {})


def check_targets(found: list[Average]) -> list[dict[str, Any]]:
    """Those that the measured schemes allow to check."""
    by_name = {(each["scheme"], each["window"]): each for each in found}
    targets = []
    for name, (most_bits, references) in CLAIMS.items():
        own = by_name.get((name, CLOSED), {})
        if own.get("bits"):
            bits = own["bits"]["true"]
            targets.append(target(f"{name}: true bits", bits, f"<= {most_bits}", bits <= most_bits))
        for kind, reference in references.items():
            other = by_name.get((reference, CLOSED), {})
            if kind in own and kind in other:
                what = f"{name}, no window: KL on {kind}"
                targets.append(_below(what, own[kind]["kl"], other[kind]["kl"], reference))
    for name, limit in WINDOW_TEXT_LIMITS.items():
        own = by_name.get((name, WINDOW), {})
        if "text" in own:
            targets.append(_below(f"{name}, its own window: KL on text", own["text"]["kl"], limit))
    return targets


def _below(what: str, value: float, limit: float, of: str = "") -> dict[str, Any]:
    return target(what, value, f"<= {limit:.4g}" + (f" ({of})" if of else ""), value <= limit)


# ---------------------------------------------------------------- Markdown

HEAD = [
    "scheme",
    "true bits",
    "+ cos/sin",
    "all bytes",
    "needle: nll difference",
    "exact",
    "KL",
    "copy: KL",
    "accuracy",
    "text: KL",
    "perplexity",
    "attention KL",
    "worst layer",
]


def to_markdown(report: dict[str, Any]) -> list[str]:
    found, settings = report["averages"], report["settings"]
    lines = [*head_lines(report), f"Seed {settings['seed']}, {settings['dtype']}. KL(full precision, scheme) in nats"]
    lines += ["per scored token, means +- standard errors over probes; nll and perplexity against full precision."]
    lines += full_precision_lines(found)
    titles = {CLOSED: "No window: everything behind the sinks is quantized", WINDOW: "With each scheme's own window"}
    for window, title in titles.items():
        rows = [table_row(each) for each in found if each["window"] == window]
        lines += ["", f"## {title}", *markdown_table(HEAD, rows)]
    lines += ["True bits: codes, scales, zero points and tables of a row, per element in closed blocks, in bfloat16;"]
    lines += ["all bytes: sinks, window and tables of cos and sin as well, over all elements, at the longest context."]
    if report["targets"]:
        lines += ["", "## Targets", *target_lines(report["targets"])]
    return lines


def full_precision_lines(found: list[Average]) -> list[str]:
    lines = []
    for kind in SETS:
        of_kind = next((each[kind] for each in found if kind in each), None)
        if of_kind:
            shares = f"exact {of_kind['exact_full']:.2f}, token accuracy {of_kind['accuracy_full']:.3f}"
            head = f"- full precision, {of_kind['probes']} {kind} probes"
            lines.append(f"{head}: {shares}, nll {of_kind['nll_full']:.3f}")
    return ["", *lines] if lines else []


def table_row(each: Average) -> list[str]:
    bits, needle, copy, text = each["bits"] or {}, each.get("needle"), each.get("copy"), each.get("text")
    attention = (text or {}).get("attention_kl")
    return [
        each["scheme"],
        *(f"{bits[name]:.2f}" if bits else "-" for name in ("true", "with_rotary", "all")),
        _with_error(needle, "nll_difference", "+.3f", ".3f"),
        f"{needle['exact']:.2f}" if needle else "-",
        _with_error(needle),
        _with_error(copy),
        f"{copy['accuracy']:.3f}" if copy else "-",
        _with_error(text),
        f"{text['perplexity_change']:+.2%}" if text else "-",
        f"{fmean(attention):.2g}" if attention else "-",
        f"{max(attention):.2g} ({attention.index(max(attention))})" if attention else "-",
    ]


def _with_error(of_kind: dict[str, Any] | None, name: str = "kl", form: str = ".2g", error_form: str = ".1g") -> str:
    if of_kind is None:
        return "-"
    error = of_kind[f"{name}_se"]
    return f"{of_kind[name]:{form}}" + ("" if error is None else f" +- {error:{error_form}}")

"""README's tables are the result files', number by number, and the paths it names exist."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attention_summary import summarize
from benchmarks.prerope import table_rows
from hf_kvquant.eval_results import Run, estimate, load, paired

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def preset_rows() -> list[str]:
    agreement = results("agreement")
    memory = {row["preset"]: row for row in agreement["memory"]["presets"] if not row["further_steps"]}
    rows = []
    for row in agreement["averages"]:
        if row["variant"] != "one_shot" or row["scheme"] not in memory:
            continue
        size = memory[row["scheme"]]
        bits = f"{size['packed_bits_per_element']:.2f} | {size['ratio']:.3f}"
        quality = f"{row['teacher_forced']:.1%} | {row['free_running']:.1%} | {row['kl_nats']:.2g}"
        rows.append(f"| `{row['scheme']}` | {bits} | {quality} |")
    return rows


def decode_rows() -> list[str]:
    """Ratios to DynamicCache with one thread, and the range of what closing or flushing costs. The long length is from
    a run of its own: in the long run other work disturbed it."""
    cells = [cell for cell in results("decode")["cells"] if cell["threads"] == 1 and cell["tokens"] < 8192]
    cells += results("decode_8192")["cells"]
    schemes = {cell["scheme"]: None for cell in cells}
    return [_decode_row(scheme, [cell for cell in cells if cell["scheme"] == scheme]) for scheme in schemes]


def _decode_row(scheme: str, row: list[dict[str, Any]]) -> str:
    costs = [cell["closing_percent"] for cell in row if cell["closing_percent"] is not None]
    ratios = " | ".join(f"{cell['ratio_to_dynamic']:.2f}" for cell in row)
    return f"| {scheme} | {ratios} | {f'{min(costs):.1f} to {max(costs):.1f}' if costs else 'none'} |"


STEPS = [("float32", 512), ("float32", 8192), ("float32", 16384), ("bfloat16", 8192), ("bfloat16", 16384)]
STEP_SCHEMES = "static transformers-quanto4 transformers-hqq4 k4v4 attached-cr4 attached-cm2"


def step_rows() -> list[str]:
    """Speed of a decode step relative to DynamicCache, one thread."""
    cells = {
        (cell["scheme"], cell["dtype"], cell["tokens"]): cell["speed"]["dynamic"]
        for cell in summarize(results("attention")["groups"])
        if cell["part"] == "step" and cell["threads"] == 1
    }
    return [
        f"| {name} | {' | '.join(f'{cells[(name, *place)]:.2f}' for place in STEPS)} |" for name in STEP_SCHEMES.split()
    ]


def prerope_rows() -> list[str]:
    return [f"| {' | '.join(row)} |" for row in table_rows(results("prerope"))]


SHOWN = "int8 k4v4 k3v3 cr4 cm4 cm3 cm2 cm4-tuned cm3-tuned cm2-tuned had4 cr4-unattached cm3-unattached"
SHOWN += " kivi4 kivi2 kvquant-like"


def quality_rows() -> list[str]:
    """Without a window, and the text column with the scheme's own as well; transformers' caches have none."""
    by_window = {(row["scheme"], row["window"]): row for row in results("quality")["averages"]}
    rows = []
    for name in [*SHOWN.split(), "transformers-quanto4", "transformers-hqq4"]:
        row, own = by_window[name, "closed"], by_window.get((name, "window"))
        needle, copied, text = row["needle"], row["copy"], row["text"]
        cells = [f"`{name}`", f"{row['bits']['true']:.2f}", f"{needle['kl']:.2g}", f"{needle['exact']:.0%}"]
        cells += [f"{copied['kl']:.2g}", f"{text['kl']:.2g}", f"{own['text']['kl']:.2g}" if own else "-"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


NEEDLE, PASSAGES = "kvq_niah_multikey", "kvq_perplexity"


def evaluated() -> dict[str, Run]:
    return {run.scheme: run for run in load([ROOT / "eval" / "results" / "smollm2"])}


def evaluation_rows() -> list[str]:
    """Differences to full precision, paired: answers, recall, perplexity."""
    runs = evaluated()
    rows = []
    for name, run in runs.items():
        cells = [f"`{name}`", f"{run.true_bits:.2f}"]
        found = f"{estimate(run, [NEEDLE], 'recall').mean:.0%}"
        nll, recall = (paired(run, runs["none"], [NEEDLE], metric) for metric in ("answer_nll", "recall"))
        text = paired(run, runs["none"], [PASSAGES], "nll")
        assert nll is not None
        assert recall is not None
        assert text is not None
        cells += [
            f"{nll.mean:+.3f} ± {nll.error:.3f}",
            found,
            f"{100 * recall.mean:+.0f} ± {100 * (recall.error or 0):.0f}",
        ]
        cells += [f"{100 * math.expm1(text.mean):+.1f}% ± {100 * (text.error or 0):.1f}"]
        rows.append("| " + " | ".join(cells if name != "none" else [*cells[:2], "-", found, "-", "-"]) + " |")
    return rows


ROWS = evaluation_rows() + preset_rows() + decode_rows() + step_rows() + prerope_rows() + quality_rows()


@pytest.mark.parametrize("row", ROWS)
def test_tables_equal_the_result_files(row) -> None:
    assert row in README


def test_memory_figures_in_the_text() -> None:
    windows = {(r["residual_length"], r["tokens"]): r["ratio"] for r in results("agreement")["memory"]["windows"]}
    text = " ".join(README.split())
    found = [f"{windows[key]:.3f}" for key in ((128, 2000), (128, 4000), (128, 8000), (64, 2000))]
    assert "takes {} of bf16 there, {} at 4,000 and {} at 8,000 tokens".format(*found[:3]) in text
    assert f"gives {found[3]} at 2,000" in text


def test_figures_of_the_variants() -> None:
    """README's range and CHANGELOG's single figures of what more bits around k4v4 do."""
    free = {
        row["scheme"]: f"{100 * row['free_running']:.0f} %"
        for row in results("agreement_variants")["averages"]
        if row["variant"] == "one_shot"
    }
    variants = sorted((name for name in free if name != "k4v4"), key=lambda name: float(free[name].split()[0]))
    text = " ".join(README.split())
    assert f"it ranges from {free[variants[0]]} to {free[variants[-1]]}" in text
    changelog = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert (
        "Groups of 32 ({}), a window of 512 ({}), 8-bit values ({}) and 8-bit keys ({})".format(
            *(free[name] for name in ("k4v4-group32", "k4v4-window512", "k4v8", "k8v4"))
        )
        in changelog
    )
    further = {row["preset"]: row["ratio"] for row in results("agreement")["memory"]["presets"] if row["further_steps"]}
    assert f"{further['k4v4']:.3f} after 64 steps" in text


@pytest.mark.parametrize(("document", "start"), [("README.md", "Of the "), ("CHANGELOG.md", "Of ")])
def test_counts_of_the_census(document, start) -> None:
    counts = re.search(r"^(\d+) types, (\d+) within .*: (.*)\.$", (ROOT / "docs/architectures.md").read_text(), re.M)
    assert counts
    text = " ".join((ROOT / document).read_text().split())
    sentence = text[text.index(f"{start}{counts[1]} ") :][:400]
    assert not [count for count in counts[3].split(", ") if count not in sentence]
    assert document == "README.md" or f"{counts[2]} are within" in sentence


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", "eval/README.md"])
def test_paths_exist(document) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"`((?:benchmarks|tests|eval|hf_kvquant|docs)/[\w./-]+)`", text))
    named |= set(re.findall(r"\]\(([\w./-]+)\)", text))
    beside = (ROOT / document).parent
    missing = [path for path in named if not (ROOT / path).exists() and not (beside / path).exists()]
    assert not missing

"""The tables of measurements in README and docs, computed from the result files."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.attention_summary import summarize
from benchmarks.prerope import table_rows
from hf_kvquant.eval_results import Run, estimate, load, paired

ROOT = Path(__file__).parent.parent
CONTROL = "DynamicCache"


@dataclass(frozen=True)
class Table:
    """A table of ``document`` that begins with the line ``head``."""

    document: str
    head: str
    rows: Callable[[], list[str]]

    def text(self) -> str:
        columns = self.head.count("|") - 1
        return "\n".join([self.head, "|" + " --- |" * columns, *self.rows()])


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


# ---------------------------------------------------------------- presets, the table of README

PRESET_ROWS = (CONTROL, *"int8 fp8 kivi4 k4v4 k4v4-pre kvquant-like".split())
PRESET_ROWS += (
    "transformers-quanto4",
    "transformers-hqq4",
    *"cm4 cr4 k4v2 k3v3-pre cm3 kivi2 k2v2 k2v2-pre cm2".split(),
)
STEP_LENGTHS, BYTES_TOKENS = (512, 8192, 16384), 8192


def preset_rows() -> list[str]:
    """Bits, retrieval and perplexity with nothing exact but the sinks; bytes and speed with the scheme's own window."""
    return [line(f"`{name}`", *quality_cells(name), *byte_cells(name), *speed_cells(name)) for name in PRESET_ROWS]


def quality_cells(name: str) -> list[str]:
    row = quality()["none" if name == CONTROL else name, "closed"]
    needle, text = row["needle"], row["text"]
    if name == CONTROL:
        return [f"{row['bits']['true']:.2f}", f"{needle['exact_full']:.0%}", "-", "-"]
    change = f"{100 * text['perplexity_change']:+.1f}% ± {100 * text['nll_difference_se']:.1f}"
    return [f"{row['bits']['true']:.2f}", f"{needle['exact']:.0%}", f"{needle['kl']:.2g}", change]


def byte_cells(name: str) -> list[str]:
    held = {(row["scheme"], row["tokens"]): row["bytes_per_token"] for row in results("bytes_per_token")["rows"]}
    return [f"{held['dynamic' if name == CONTROL else name, BYTES_TOKENS]:,.0f}"]


def speed_cells(name: str) -> list[str]:
    """Speed of a decode step relative to DynamicCache, fp32, one thread; an attached preset's on an attached model."""
    known = step_speeds()
    names = ("dynamic",) if name == CONTROL else (name, f"attached-{name}")
    found = [
        [known[each, "float32", tokens] for each in names if (each, "float32", tokens) in known][:1]
        for tokens in STEP_LENGTHS
    ]
    return [f"{speed[0]:.2f}" if speed else "-" for speed in found]


@functools.cache
def quality() -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["scheme"], row["window"]): row for row in results("quality")["averages"]}


@functools.cache
def step_cells() -> list[dict[str, Any]]:
    cells = summarize(results("attention")["groups"])
    return [cell for cell in cells if cell["part"] == "step" and cell["threads"] == 1]


def step_speeds() -> dict[tuple[str, str, int], float]:
    return {(cell["scheme"], cell["dtype"], cell["tokens"]): cell["speed"]["dynamic"] for cell in step_cells()}


# ---------------------------------------------------------------- docs/quality.md

FORMATS = "int8 k4v4 k3v3 cr4 cm4 cm3 cm2 cm4-tuned cm3-tuned cm2-tuned had4 cr4-unattached cm3-unattached"
FORMATS += " kivi4 kivi2 kvquant-like transformers-quanto4 transformers-hqq4"


def format_rows() -> list[str]:
    """Without a window, and the text column with the scheme's own as well; transformers' caches have none."""
    rows = []
    for name in FORMATS.split():
        row, own = quality()[name, "closed"], quality().get((name, "window"))
        needle, copied, text = row["needle"], row["copy"], row["text"]
        cells = [f"`{name}`", f"{row['bits']['true']:.2f}", f"{needle['kl']:.2g}", f"{needle['exact']:.0%}"]
        cells += [f"{copied['kl']:.2g}", f"{text['kl']:.2g}", f"{own['text']['kl']:.2g}" if own else "-"]
        rows.append(line(*cells))
    return rows


def agreement_rows() -> list[str]:
    agreement = results("agreement")
    memory = {row["preset"]: row for row in agreement["memory"]["presets"] if not row["further_steps"]}
    rows = []
    for row in agreement["averages"]:
        if row["variant"] != "one_shot" or row["scheme"] not in memory:
            continue
        size = memory[row["scheme"]]
        bits = [f"{size['packed_bits_per_element']:.2f}", f"{size['ratio']:.3f}"]
        shares = [f"{row['teacher_forced']:.1%}", f"{row['free_running']:.1%}", f"{row['kl_nats']:.2g}"]
        rows.append(line(f"`{row['scheme']}`", *bits, *shares))
    return rows


def prerope_rows() -> list[str]:
    return [line(*row) for row in table_rows(results("prerope"))]


NEEDLE, PASSAGES = "kvq_niah_multikey", "kvq_perplexity"


@functools.cache
def evaluated() -> dict[str, Run]:
    return {run.scheme: run for run in load([ROOT / "eval" / "results" / "smollm2"])}


def evaluation_rows() -> list[str]:
    """Differences to full precision, paired: answers, recall, perplexity."""
    return [line(f"`{name}`", f"{run.true_bits:.2f}", *_evaluation_cells(name)) for name, run in evaluated().items()]


def _evaluation_cells(name: str) -> list[str]:
    run, full = evaluated()[name], evaluated()["none"]
    found = f"{estimate(run, [NEEDLE], 'recall').mean:.0%}"
    if name == "none":
        return ["-", found, "-", "-"]
    nll, recall, text = (
        paired(run, full, [task], metric)
        for task, metric in ((NEEDLE, "answer_nll"), (NEEDLE, "recall"), (PASSAGES, "nll"))
    )
    assert nll is not None
    assert recall is not None
    assert text is not None
    points = f"{100 * recall.mean:+.0f} ± {100 * (recall.error or 0):.0f}"
    change = f"{100 * math.expm1(text.mean):+.1f}% ± {100 * (text.error or 0):.1f}"
    return [f"{nll.mean:+.3f} ± {nll.error:.3f}", found, points, change]


# ---------------------------------------------------------------- docs/speed.md

STEPS = [
    ("float32", 512),
    ("float32", 2048),
    ("float32", 8192),
    ("float32", 16384),
    ("bfloat16", 8192),
    ("bfloat16", 16384),
]
STEP_SCHEMES = "static transformers-quanto4 transformers-hqq4 k4v4 attached-cr4 attached-cm2"


def step_rows() -> list[str]:
    speeds = step_speeds()
    return [line(name, *(f"{speeds[(name, *place)]:.2f}" for place in STEPS)) for name in STEP_SCHEMES.split()]


def decode_rows() -> list[str]:
    """Times relative to DynamicCache with one thread, and the range of what closing or flushing costs. The long length
    is from a run of its own: in the long run other work disturbed it."""
    cells = [cell for cell in results("decode")["cells"] if cell["threads"] == 1 and cell["tokens"] < 8192]
    cells += results("decode_8192")["cells"]
    schemes = dict.fromkeys(cell["scheme"] for cell in cells)
    return [_decode_row(scheme, [cell for cell in cells if cell["scheme"] == scheme]) for scheme in schemes]


def _decode_row(scheme: str, row: list[dict[str, Any]]) -> str:
    costs = [cell["closing_percent"] for cell in row if cell["closing_percent"] is not None]
    ratios = [f"{cell['ratio_to_dynamic']:.2f}" for cell in row]
    return line(scheme, *ratios, f"{min(costs):.1f} to {max(costs):.1f}" if costs else "none")


TABLES = (
    Table(
        "README.md",
        "| cache | true bits | found | answers, KL | perplexity | bytes per token | speed, T = 512 | 8,192 | 16,384 |",
        preset_rows,
    ),
    Table(
        "docs/quality.md",
        "| format | true bits | needle: KL | found exactly | copy: KL | text: KL | with its window |",
        format_rows,
    ),
    Table(
        "docs/quality.md",
        "| cache | true bits | answer nll, nats per token | found | difference, points | perplexity |",
        evaluation_rows,
    ),
    Table(
        "docs/quality.md",
        "| preset | bits in closed blocks | bytes at 2,000 tokens, of bf16 | same token, fed the reference "
        "| same token, free running | KL, nats per token |",
        agreement_rows,
    ),
    Table(
        "docs/quality.md",
        "| keys | error after RoPE | before | score error after RoPE | before | reading, before / after | closing |",
        prerope_rows,
    ),
    Table(
        "docs/speed.md",
        "| cache | fp32, T = 512 | 2,048 | 8,192 | 16,384 | bf16, 8,192 | 16,384 |",
        step_rows,
    ),
    Table(
        "docs/speed.md",
        "| cache | T = 1,024 | T = 4,096 | T = 8,192 | closing or flushing, % of the steps between |",
        decode_rows,
    ),
)

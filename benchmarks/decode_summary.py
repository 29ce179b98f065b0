"""From the timed steps of ``benchmarks.decode`` to its figures, targets and table.

Decision: a step in which the process got less CPU time than passed on the clock was waiting for others. Where a scheme
waits in the median, the targets of that length are DISTURBED, neither PASS nor NOT REACHED: ratios of contended times
mean little, and the cost of closing, a small difference of two of them, means nothing.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.common import DYNAMIC, QUANTO, head_lines, markdown_table, target, target_lines
from hf_kvquant import PRESETS

CYCLE = 128  # tokens in a round: one flush of transformers' caches, two closings of ours
STEP_LIMIT, CLOSING_LIMIT = 1.5, 5.0
QUIET_LIMIT = 0.9

Sample = dict[str, Any]


def paired_ratio(samples: list[Sample], name: str, base: str) -> float | None:
    """Median over positions, ordinary for both, of the ratio of times."""
    seconds = {(s["round"], s["offset"], s["scheme"]): s["seconds"] for s in samples if not s["closes"]}
    ratios = [
        value / seconds[number, offset, base]
        for (number, offset, scheme), value in seconds.items()
        if scheme == name and (number, offset, base) in seconds
    ]
    return median(ratios) if ratios else None


def closing_costs(samples: list[Sample]) -> list[float]:
    """Seconds of each closing step above the median ordinary step of its round."""
    costs = []
    for number in {s["round"] for s in samples}:
        here = [s for s in samples if s["round"] == number]
        ordinary = median(s["seconds"] for s in here if not s["closes"])
        costs += [s["seconds"] - ordinary for s in here if s["closes"]]
    return costs


def summarize(samples: list[Sample], name: str, closings: list[int]) -> dict[str, Any]:
    """The figures of one scheme at one length."""
    own = [s for s in samples if s["scheme"] == name]
    step = median(s["seconds"] for s in own if not s["closes"])
    costs = closing_costs(own)
    interval = CYCLE // len(closings) if closings else None
    return {
        "scheme": name,
        "step_seconds": step,
        "cpu_per_wall": median(s["cpu_seconds"] / s["seconds"] for s in own),
        "ratio_to_dynamic": paired_ratio(samples, name, DYNAMIC),
        "ratio_to_quanto": paired_ratio(samples, name, QUANTO),
        "closing_interval_tokens": interval,
        "closing_seconds": median(costs) if costs else None,
        "closing_percent": 100 * median(costs) / (interval * step) if costs and interval else None,
        "ordinary_samples": sum(not s["closes"] for s in own),
        "closing_samples": len(costs),
    }


def check_targets(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our presets against the limits that the project set itself."""
    targets = []
    for cell in cells:
        if cell["scheme"] not in PRESETS:
            continue
        place = f"{cell['scheme']}, T={cell['tokens']}, threads={cell['threads']}"
        beside = [c for c in cells if (c["threads"], c["tokens"]) == (cell["threads"], cell["tokens"])]
        quiet = min(c["cpu_per_wall"] for c in beside) >= QUIET_LIMIT
        ratio, closing = cell["ratio_to_quanto"], cell["closing_percent"]
        if ratio is not None:
            targets.append(target(f"{place}: step / quanto's", ratio, f"<= {STEP_LIMIT}", ratio <= STEP_LIMIT, quiet))
        if closing is not None:
            what = f"{place}: closing, % of {cell['closing_interval_tokens']} steps"
            targets.append(target(what, closing, f"< {CLOSING_LIMIT}", closing < CLOSING_LIMIT, quiet))
    return targets


def to_markdown(report: dict[str, Any]) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    rows = [
        [str(c["threads"]), str(c["tokens"]), c["scheme"], f"{1e3 * c['step_seconds']:.1f}"]
        + [number(c[key], ".2f") for key in ("ratio_to_dynamic", "ratio_to_quanto")]
        + [number(c["closing_seconds"] and 1e3 * c["closing_seconds"], ".1f")]
        + [number(c["closing_percent"], ".1f"), number(c["closing_interval_tokens"], "d"), f"{c['cpu_per_wall']:.2f}"]
        for c in report["cells"]
    ]
    head = ["threads", "T", "cache", "step ms", "/ dynamic", "/ quanto"]
    head += ["closing ms", "closing %", "of steps", "CPU / clock"]
    return head_lines(report) + markdown_table(head, rows) + target_lines(report["targets"])

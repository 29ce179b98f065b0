"""From the samples of ``benchmarks.attention`` to its figures, targets and tables.

Decisions: a speed is "times as fast as", the median over rounds of the ratio of times in the same round. As in
``benchmarks.decode_summary``, a group in which some scheme got less CPU time than passed on the clock decides nothing;
nor does one in which the matrix product, which can use every thread, got less than that of all threads.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.attention_op import COPY, PRODUCT
from benchmarks.attention_step import ATTACHED, BASE, HQQ, INCUMBENTS, OURS, STATIC
from benchmarks.common import DYNAMIC, QUANTO, head_lines, markdown_table, target, target_lines
from benchmarks.decode_summary import QUIET_LIMIT, Sample, paired_ratio

Group = dict[str, Any]
Cell = dict[str, Any]

FULL_FORMS = ("sdpa-grouped", "products-grouped", "sdpa-repeated")
LIMITS = (COPY, PRODUCT)
KEPT = ("part", "threads", "dtype", "place")
MAIN_SHAPE = "H=32 K=8 D=128 T=16384"
OP_TARGETS = {"k4v4": 3.0, "cm2": 3.5, "cm3": 3.5, "k4v4-pre": 1.5}
GOALS = {"k4v4": 6.0}
DECIDED = (f"{ATTACHED}cr4", f"{ATTACHED}cm2")
# (tokens, dtype): how many times as fast as the step with each other cache.
STEP_TARGETS = {
    (8192, "float32"): {DYNAMIC: 1.9, STATIC: 1.2, QUANTO: 2.7, HQQ: 2.7},
    (8192, "bfloat16"): {DYNAMIC: 4.5},
    (16384, "float32"): {DYNAMIC: 3.0},
    (16384, "bfloat16"): {DYNAMIC: 6.0},
}
SHORT, SHORT_TARGET = 512, 0.95
SHARE_AT, SHARE_TARGET = (8192, "float32"), 3.5
SCORES_LIMIT, FULL_LIMIT = 4.0, 0.25
# Below this part of a step without a past, a difference of two steps is noise.
SHARE_FLOOR = 0.1


def medians(samples: list[Sample]) -> dict[str, float]:
    """Seconds by scheme, of the steps that close nothing."""
    seconds: dict[str, list[float]] = {}
    for sample in samples:
        if not sample["closes"]:
            seconds.setdefault(sample["scheme"], []).append(sample["seconds"])
    return {name: median(each) for name, each in seconds.items()}


def cpu_per_wall(samples: list[Sample], name: str) -> float:
    return median(s["cpu_seconds"] / s["seconds"] for s in samples if s["scheme"] == name)


def summarize(groups: list[Group]) -> list[Cell]:
    """The figures of every scheme in every group."""
    make = {"op": op_cells, "step": step_cells, "memory": memory_cells}
    return [{key: group[key] for key in KEPT} | cell for group in groups for cell in make[group["part"]](group)]


def op_cells(group: Group) -> list[Cell]:
    samples, facts, seconds = group["samples"], group["facts"], medians(group["samples"])
    fastest = min(FULL_FORMS, key=lambda name: seconds[name])
    bandwidth = facts[COPY]["bytes"] / seconds[COPY]
    peak = facts[PRODUCT]["multiply_adds"] / seconds[PRODUCT]
    cells = []
    for name in facts:
        if name in LIMITS:
            continue
        by_bytes, by_work = facts[name]["bytes"] / bandwidth, facts[name]["multiply_adds"] / peak
        cells.append(
            {
                "scheme": name,
                "seconds": seconds[name],
                "fastest_full": fastest,
                "speed": paired_ratio(samples, fastest, name),
                "bytes_seconds": by_bytes,
                "work_seconds": by_work,
                "fraction_of_limit": max(by_bytes, by_work) / seconds[name],
                "bandwidth": bandwidth,
                "peak": peak,
                "error": facts[name].get("error"),
                "cpu_per_wall": cpu_per_wall(samples, name),
                "cores_had": cpu_per_wall(samples, PRODUCT) / group["threads"],
            }
        )
    return cells


def step_cells(group: Group) -> list[Cell]:
    samples, seconds = group["samples"], medians(group["samples"])
    cells = []
    for name in (each for each in (BASE, *INCUMBENTS, *OURS) if each in seconds):
        cells.append(
            {
                "tokens": group["tokens"],
                "scheme": name,
                "seconds": seconds[name],
                "attention_seconds": seconds[name] - seconds[BASE],
                "speed": {other: paired_ratio(samples, other, name) for other in INCUMBENTS},
                "attention_speed": attention_speed(samples, name),
                "cpu_per_wall": cpu_per_wall(samples, name),
                "cores_had": cpu_per_wall(samples, PRODUCT) / group["threads"],
                "samples": sum(s["scheme"] == name and not s["closes"] for s in samples),
            }
        )
    return cells


def attention_speed(samples: list[Sample], name: str) -> float | None:
    """How many times as fast as with DynamicCache the step is, the median step of 64 tokens taken off both; None where
    too little is left of them."""
    seconds = medians(samples)
    base = seconds[BASE]
    if min(seconds[each] - base for each in (DYNAMIC, name)) < SHARE_FLOOR * base:
        return None
    shares = [s | {"seconds": s["seconds"] - base} for s in samples]
    return paired_ratio(shares, DYNAMIC, name)


def memory_cells(group: Group) -> list[Cell]:
    rows = sorted(group["rows"], key=lambda row: row["tokens"])
    growth = {key: rows[-1][key] - rows[0][key] for key in ("peak", "scores", "full")}
    cell = {"scheme": group["scheme"], "rows": rows}
    return [cell | {f"growth_to_{key}": growth["peak"] / growth[key] for key in ("scores", "full")}]


def check_targets(cells: list[Cell]) -> list[dict[str, Any]]:
    """What the project set itself, against what was measured."""
    check = {"op": op_targets, "step": step_targets, "memory": memory_targets}
    return [each for cell in cells for each in check[cell["part"]](cell, is_quiet(cell, cells))]


def is_quiet(cell: Cell, cells: list[Cell]) -> bool:
    beside = [each for each in cells if all(each[key] == cell[key] for key in KEPT)]
    return min(each.get(key, 1.0) for each in beside for key in ("cpu_per_wall", "cores_had")) >= QUIET_LIMIT


def op_targets(cell: Cell, quiet: bool) -> list[dict[str, Any]]:
    least = OP_TARGETS.get(cell["scheme"])
    if cell["place"] != MAIN_SHAPE or least is None:
        return []
    found = [_speed_target(f"{_where(cell)}: {cell['fastest_full']} / ours", cell["speed"], least, quiet)]
    if goal := GOALS.get(cell["scheme"]):
        found.append(_speed_target(f"{_where(cell)}: the same, goal", cell["speed"], goal, quiet))
    return found


def step_targets(cell: Cell, quiet: bool) -> list[dict[str, Any]]:
    if cell["scheme"] == "k4v4" and cell["speed"][QUANTO] is not None:
        return [_speed_target(f"{_where(cell)}: {QUANTO} / ours, not attached", cell["speed"][QUANTO], 1.0, quiet)]
    if cell["scheme"] not in DECIDED or cell["threads"] != 1:
        return []
    place = cell["tokens"], cell["dtype"]
    limits = {DYNAMIC: SHORT_TARGET} if cell["tokens"] <= SHORT else STEP_TARGETS.get(place, {})
    found = [
        _speed_target(f"{_where(cell)}: {other} / ours", cell["speed"][other], least, quiet)
        for other, least in limits.items()
        if cell["speed"][other] is not None
    ]
    if place == SHARE_AT and cell["attention_speed"] is not None:
        what = f"{_where(cell)}: {DYNAMIC} / ours, attention alone"
        found.append(_speed_target(what, cell["attention_speed"], SHARE_TARGET, quiet))
    return found


def memory_targets(cell: Cell, quiet: bool) -> list[dict[str, Any]]:
    limits = {"scores": SCORES_LIMIT, "full": FULL_LIMIT}
    names = {"scores": "growth of the peak / of the scores", "full": "growth of the peak / of the dequantized past"}
    found = []
    for key, limit in limits.items():
        value = cell[f"growth_to_{key}"]
        found.append(target(f"{_where(cell)}: {names[key]}", value, f"<= {limit}", value <= limit, quiet))
    return found


def _speed_target(what: str, speed: float, least: float, quiet: bool) -> dict[str, Any]:
    return target(what, speed, f">= {least}", speed >= least, quiet)


def _where(cell: Cell) -> str:
    threads = "" if cell["part"] == "memory" else f", threads={cell['threads']}"
    return f"{cell['part']} {cell['scheme']}, {cell['place']}, {cell['dtype']}{threads}"


def to_markdown(report: dict[str, Any]) -> list[str]:
    tables = {"op": op_table, "step": step_table, "memory": memory_table}
    lines = head_lines(report)
    runs = dict.fromkeys((group["command"], group["date"][:10]) for group in report["groups"])
    lines += ["Groups are kept until they are measured again. They come from", ""]
    lines += [*(f"- `{command}`, {date}" for command, date in runs), ""]
    for part, table in tables.items():
        cells = [cell for cell in report["cells"] if cell["part"] == part]
        if cells:
            lines += [f"## {part}", *table(cells)]
    return lines + target_lines(report["targets"])


def op_table(cells: list[Cell]) -> list[str]:
    rows = [
        [c["place"], c["dtype"], str(c["threads"]), c["scheme"]]
        + [_number(each) for each in (1e3 * c["seconds"], c["speed"], 100 * c["fraction_of_limit"])]
        + [_number(1e3 * c[each]) for each in ("bytes_seconds", "work_seconds")]
        + [format(c["error"], ".1e") if c["error"] else "", *map(_number, (c["cpu_per_wall"], c["cores_had"]))]
        for c in cells
    ]
    head = ["shape", "dtype", "threads", "attention", "ms", "speed", "% of the limit", "bytes ms", "multiply-adds ms"]
    return limit_lines(cells) + markdown_table([*head, "error", "CPU / clock", "cores had"], rows)


def limit_lines(cells: list[Cell]) -> list[str]:
    """What the machine did in each group."""
    limits = {
        (c["threads"], c["dtype"], c["place"]): f"{c['bandwidth'] / 1e9:.1f} GB/s, {c['peak'] / 1e9:.0f} G/s"
        for c in cells
    }
    lines = ["", "Copy (bytes read and written) and fp32 multiply-adds, by group:", ""]
    return lines + [f"- {place}, {dtype}, threads={n}: {text}" for (n, dtype, place), text in limits.items()]


def step_table(cells: list[Cell]) -> list[str]:
    rows = [
        [c["dtype"], str(c["threads"]), str(c["tokens"]), c["scheme"], f"{1e3 * c['seconds']:.1f}"]
        + [_number(c["speed"][other]) for other in INCUMBENTS]
        + [
            f"{1e3 * c['attention_seconds']:.1f}",
            _number(c["attention_speed"]),
            *map(_number, (c["cpu_per_wall"], c["cores_had"])),
        ]
        for c in cells
    ]
    head = ["dtype", "threads", "T", "cache", "step ms", *(f"speed to {name}" for name in INCUMBENTS)]
    return markdown_table([*head, "attention ms", "attention speed to dynamic", "CPU / clock", "cores had"], rows)


def memory_table(cells: list[Cell]) -> list[str]:
    rows = [
        [c["place"], c["dtype"], c["scheme"], str(row["tokens"])]
        + [f"{row[key] / 2**20:.2f}" for key in ("peak", "scores", "full")]
        + [f"{c[f'growth_to_{key}']:.2f}" for key in ("scores", "full")]
        for c in cells
        for row in c["rows"]
    ]
    head = ["shape", "dtype", "attention", "T", "peak MiB", "scores MiB", "dequantized past MiB"]
    return markdown_table([*head, "growth / scores'", "growth / dequantized past's"], rows)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

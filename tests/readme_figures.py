"""The figures in the prose of README, docs and CHANGELOG, computed from the result files."""

from __future__ import annotations

import re
from typing import Any

from benchmarks.attention_summary import summarize
from tests.readme_tables import ROOT, results, step_cells, step_speeds


def figures() -> list[tuple[str, str]]:
    """Document and a piece of its text, white space aside, that holds figures."""
    return [
        *_speed_figures(),
        *_missed_figures(),
        *_operation_figures(),
        *_memory_figures(),
        *_agreement_figures(),
        *_census_figures(),
    ]


def _speed_figures() -> list[tuple[str, str]]:
    speeds = {key: f"{value:.2f}" for key, value in step_speeds().items()}
    cr4, cm2, k4v4 = (
        {key[1:]: each for key, each in speeds.items() if key[0] == name}
        for name in ("attached-cr4", "attached-cm2", "k4v4")
    )
    short, middle = (sorted(each["float32", tokens] for each in (cr4, cm2, k4v4)) for tokens in (512, 2048))
    slowest, fastest = short[0], short[-1]
    longer = f"at 2,048 {middle[0]} to {middle[-1]}"
    seconds = next(cell["seconds"] for cell in step_cells() if _is_base(cell))
    eight, sixteen, half = ("float32", 8192), ("float32", 16384), ("bfloat16", 16384)
    return [
        ("docs/speed.md", f"{1000 * seconds:.0f} ms of each step in fp32 are the model itself"),
        (
            "docs/speed.md",
            f"At 512 tokens in fp32 ours run at {slowest} to {fastest} of DynamicCache's speed, {longer}",
        ),
        ("README.md", f"at 512 tokens {slowest} to {fastest} of DynamicCache's speed, {longer}"),
        (
            "CHANGELOG.md",
            f"`cr4` {cr4[eight]} and `cm2` {cm2[eight]} times as fast as DynamicCache, not 1.9 (`k4v4` {k4v4[eight]}); "
            f"at 16,384 {cr4[sixteen]} and {cm2[sixteen]}, not 3 (`k4v4` {k4v4[sixteen]})",
        ),
        ("CHANGELOG.md", f"at 16,384 {cr4[half]} and {cm2[half]} (limit 6; `k4v4` {k4v4[half]})"),
    ]


def _missed_figures() -> list[tuple[str, str]]:
    """cr4 and cm2 against the other caches, and where they are slowest."""
    cells = {(cell["scheme"], cell["dtype"], cell["tokens"]): cell for cell in step_cells()}
    cr4, cm2 = (cells[name, "float32", 8192] for name in ("attached-cr4", "attached-cm2"))

    def both(cache: str) -> str:
        return f"{cr4['speed'][cache]:.2f} and {cm2['speed'][cache]:.2f}"

    half = {key[1:]: f"{speed:.2f}" for key, speed in step_speeds().items() if key[0] == "attached-cm2"}
    first = {name: f"{cells[name, 'float32', 64]['speed']['dynamic']:.2f}" for name in ("attached-cr4", "attached-cm2")}
    texts = [
        f"attention alone {cr4['attention_speed']:.2f} and {cm2['attention_speed']:.2f} times (limit 3.5)",
        f"in bf16 {step_speeds()['attached-cr4', 'bfloat16', 8192]:.2f} and {half['bfloat16', 8192]} (limit 4.5)",
        f"at 64 in fp32 `cr4` {first['attached-cr4']}, not 0.95 (`cm2` {first['attached-cm2']})",
        f"{both('static')} times StaticCache (limit 1.2)",
        f"QuantizedCache {both('transformers-quanto4')} (quanto) and {both('transformers-hqq4')} (hqq), limit 2.7",
    ]
    static, plain = (cells[name, "float32", 8192]["speed"]["dynamic"] for name in ("static", "k4v4"))
    own = f"{cr4['speed']['dynamic']:.2f}, `k4v4` {plain:.2f}"
    beside = f"({static:.2f} times DynamicCache; `cr4` {own})"
    return [*(("CHANGELOG.md", text) for text in texts), ("README.md", beside)]


def _operation_figures() -> list[tuple[str, str]]:
    """One layer alone, 16,384 tokens and 32 heads of 128."""
    cells = summarize(results("attention")["groups"])
    main = [cell for cell in cells if cell["part"] == "op" and cell["place"] == "H=32 K=8 D=128 T=16384"]
    main = [cell for cell in main if cell["threads"] == 1]
    speed, half = (
        {cell["scheme"]: f"{cell['speed']:.2f}" for cell in main if cell["dtype"] == dtype}
        for dtype in ("float32", "bfloat16")
    )
    both = {
        cell["scheme"]: f"{cell['speed']['dynamic']:.2f}"
        for cell in cells
        if (cell["part"], cell["threads"], cell["dtype"], cell.get("tokens")) == ("step", 2, "float32", 8192)
    }
    text = f"`cm3` {speed['cm3']} and `cm2` {speed['cm2']} times (limit 3.5), `k4v4` {speed['k4v4']} (limit 3), "
    halves = (
        f"`k4v4` {half['k4v4']}, not 3, `cm2` {half['cm2']} and `cm3` {half['cm3']}, not 3.5 (`cr4` {half['cr4']}; "
    )
    halves += f"`k4v4-pre` {half['k4v4-pre']}, limit 1.5)"
    threads = f"`k4v4` {both['k4v4']}, `cr4` {both['attached-cr4']} and `cm2` {both['attached-cm2']} times DynamicCache"
    figures = (f"{text}`k4v4-pre` {speed['k4v4-pre']} (limit 1.5)", halves, threads)
    return [*(("CHANGELOG.md", each) for each in figures), ("docs/speed.md", threads)]


def _is_base(cell: dict[str, Any]) -> bool:
    return (cell["scheme"], cell["dtype"], cell["tokens"]) == ("base", "float32", 512)


def _memory_figures() -> list[tuple[str, str]]:
    windows = {(r["residual_length"], r["tokens"]): r["ratio"] for r in results("agreement")["memory"]["windows"]}
    first, second, third, short = (f"{windows[key]:.3f}" for key in ((128, 2000), (128, 4000), (128, 8000), (64, 2000)))
    presets = results("agreement")["memory"]["presets"]
    further = next(row["ratio"] for row in presets if row["preset"] == "k4v4" and row["further_steps"])
    return [
        ("docs/quality.md", f"takes {first} of bf16 there, {second} at 4,000 and {third} at 8,000 tokens"),
        ("docs/quality.md", f"gives {short} at 2,000"),
        ("docs/quality.md", f"{further:.3f} after 64 steps"),
    ]


def _agreement_figures() -> list[tuple[str, str]]:
    """The range and the single figures of what more bits around k4v4 do."""
    rows = [row for row in results("agreement_variants")["averages"] if row["variant"] == "one_shot"]
    free = {row["scheme"]: round(100 * row["free_running"]) for row in rows}
    variants = sorted(share for name, share in free.items() if name != "k4v4")
    group, window, values, keys = (free[name] for name in ("k4v4-group32", "k4v4-window512", "k4v8", "k8v4"))
    return [
        ("docs/quality.md", f"it ranges from {variants[0]} % to {variants[-1]} %"),
        (
            "CHANGELOG.md",
            f"Groups of 32 ({group} %), a window of 512 ({window} %), 8-bit values ({values} %) and 8-bit keys "
            f"({keys} %)",
        ),
    ]


def _census_figures() -> list[tuple[str, str]]:
    found = re.search(r"^(\d+) types, (\d+) within .*: (.*)\.$", (ROOT / "docs/architectures.md").read_text(), re.M)
    assert found
    total, equal, counts = found.groups()
    return [
        ("README.md", f"Of the {total} causal-LM types of transformers 5.24, {equal} give the logits of DynamicCache"),
        ("docs/limits.md", f"Of the {total} causal-LM types"),
        *(("docs/limits.md", count.strip()) for count in counts.split(",")),
        *(("CHANGELOG.md", count.strip()) for count in counts.split(",")),
        ("CHANGELOG.md", f"{equal} are within"),
    ]

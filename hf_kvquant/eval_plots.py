"""Pictures of an evaluation: where in the context facts are lost, what bits buy, and what perplexity does not show.

Decision: no pyplot, whose global state and choice of backend a library does not need; a ``Figure`` writes itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from hf_kvquant.eval_results import Estimate, Run, cells, compared, estimate, paired

DPI = 110
COLUMNS = 5  # heat maps in a row


def draw(runs: Sequence[Run], folder: Path) -> list[Path]:
    """The pictures that the runs allow, in ``folder``."""
    with_answers = [run for run in runs if run.tasks(retrieval=True)]
    written: list[Path] = []
    if with_answers:
        written.append(draw_heat_maps(with_answers, folder / "depth_length.png"))
        written.append(draw_bits(with_answers, folder / "bits.png"))
    pairs = compared([run for run in with_answers if run.tasks(retrieval=False)])
    if pairs:
        written.append(draw_perplexity(pairs, folder / "perplexity.png"))
    return written


def draw_heat_maps(runs: Sequence[Run], path: Path) -> Path:
    """Recall by length and depth, one panel per scheme, over all tasks with answers."""
    every = sorted({cell for run in runs for cell in cells(run, run.tasks(retrieval=True))})
    lengths, depths = sorted({length for length, _ in every}), sorted({depth for _, depth in every})
    lines = math.ceil(len(runs) / COLUMNS)
    figure = Figure(figsize=(2.2 * COLUMNS, 0.9 + lines * (1.0 + 0.4 * len(depths))), layout="constrained")
    grid = figure.subplots(lines, COLUMNS, squeeze=False)
    image: Any = None
    for axes, run in zip(grid.flat, runs, strict=False):
        image = _heat_map(axes, run, lengths, depths)
    for axes in figure.axes[len(runs) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=figure.axes, label="recall")
    figure.supxlabel("context, tokens")
    figure.supylabel("depth of the fact")
    figure.savefig(path, dpi=DPI)
    return path


def _heat_map(axes: Axes, run: Run, lengths: Sequence[int], depths: Sequence[float]) -> Any:
    found = cells(run, run.tasks(retrieval=True))
    values = [
        [
            fmean(row["recall"] for row in found[length, depth]) if (length, depth) in found else math.nan
            for length in lengths
        ]
        for depth in depths
    ]
    image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize="small")
    axes.set_yticks(range(len(depths)), [f"{depth:.3g}" for depth in depths], fontsize="small")
    axes.set_title(f"{run.label.removeprefix('transformers:')}, {run.true_bits:.1f} bits", fontsize="small")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if not math.isnan(value):
                color = "black" if value > 0.6 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="small", color=color)
    return image


def draw_bits(runs: Sequence[Run], path: Path) -> Path:
    """Answer nll (its paired difference to full precision where there is one) and recall, against true bits."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set_title("Likelihood of the answers")
    right.set_title("Answers found")
    pairs = compared(runs)
    if pairs:
        _against_bits(left, [(run, paired(run, reference, run.tasks(True), "answer_nll")) for run, reference in pairs])
        left.set(ylabel="answer nll above full precision, nats per token")
        left.set_yscale("symlog", linthresh=0.01)
    else:
        _against_bits(left, [(run, estimate(run, run.tasks(True), "answer_nll")) for run in runs])
        left.set(ylabel="answer nll, nats per token")
    shown = [run for run, _ in pairs] or runs
    _against_bits(right, [(run, estimate(run, run.tasks(True), "recall")) for run in shown])
    right.set(ylabel="recall")
    for height in {estimate(reference, reference.tasks(True), "recall").mean for _, reference in pairs}:
        right.axhline(height, color="gray", linestyle=":")
    figure.savefig(path, dpi=DPI)
    return path


def _against_bits(axes: Axes, measured: Sequence[tuple[Run, Estimate | None]]) -> None:
    for run, value in measured:
        if value is not None:
            _point(axes, run, (run.true_bits, None), (value.mean, value.error))
    axes.set_xlabel("true bits per element")
    axes.grid(alpha=0.3)
    axes.margins(0.15)


def draw_perplexity(pairs: Sequence[tuple[Run, Run]], path: Path) -> Path:
    """What is lost in recall against what is lost in perplexity, both paired to full precision."""
    figure = Figure(figsize=(6.5, 5), layout="constrained")
    axes = figure.subplots()
    for run, reference in pairs:
        text = paired(run, reference, run.tasks(False), "nll")
        found = paired(run, reference, run.tasks(True), "recall")
        if text is not None and found is not None:
            _point(axes, run, _percent(text), (found.mean, found.error))
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.axvline(0, color="gray", linewidth=0.8)
    title = "Recall against perplexity"
    axes.set(title=title, xlabel="perplexity, change in %", ylabel="recall, difference to full precision")
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.grid(alpha=0.3)
    axes.margins(0.12)
    figure.savefig(path, dpi=DPI)
    return path


def _percent(nll: Estimate) -> tuple[float, float | None]:
    """A difference of nll as a change of perplexity in percent, error to first order."""
    factor = math.exp(nll.mean)
    return 100 * (factor - 1), None if nll.error is None else 100 * factor * nll.error


def _point(axes: Axes, run: Run, x: tuple[float, float | None], y: tuple[float, float | None]) -> None:
    axes.errorbar(x[0], y[0], xerr=x[1], yerr=y[1], fmt="o", capsize=3)
    axes.annotate(
        run.label.removeprefix("transformers:"),
        (x[0], y[0]),
        textcoords="offset points",
        xytext=(5, 5),
        fontsize="small",
    )

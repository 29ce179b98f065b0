"""Pictures of ``benchmarks.quality``: error against true bits, and attention error per layer.

Decision: no pyplot, whose global state and choice of backend a benchmark does not need; a ``Figure`` writes itself.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from benchmarks.quality_schemes import CLOSED, CONFIGS, INCUMBENTS, WINDOW
from benchmarks.samples import SETS

DPI = 120
FAMILIES = {
    "per channel": "tab:blue",
    "per channel, before RoPE": "tab:green",
    "per token": "tab:orange",
    "rotated": "tab:purple",
    "centred, static widths": "tab:red",
    "centred, widths tuned by layer": "black",
    "transformers": "tab:gray",
    "other": "tab:brown",
}
MARKERS = {CLOSED: "o", WINDOW: "_"}


def draw(found: list[dict[str, Any]], path: Path) -> list[Path]:
    """The pictures that the results allow, beside ``path``."""
    written = []
    if any(each["bits"] for each in found):
        written.append(draw_errors(found, path.with_suffix(".png")))
    layered = [each for each in found if each["window"] == CLOSED and each.get("text", {}).get("attention_kl")]
    if layered:
        written.append(draw_layers(layered, path.with_name(f"{path.stem}_layers.png")))
    return written


def family(scheme: str) -> str:
    if scheme in INCUMBENTS:
        return "transformers"
    config = CONFIGS[scheme]
    if config.key.widths:
        return "centred, widths tuned by layer" if config.layers else "centred, static widths"
    if config.key.rotation:
        return "rotated"
    if config.key.axis not in ("channel", "token"):
        return "other"
    return f"per {config.key.axis}" + (", before RoPE" if config.pre_rope else "")


def draw_errors(found: list[dict[str, Any]], path: Path) -> Path:
    """KL, log axis, against true bits: one panel per set; a bar marks the same scheme behind its own window. The
    unattached forms, worse copies of others, are left to the tables."""
    found = [each for each in found if not each["scheme"].endswith("-unattached")]
    figure = Figure(figsize=(21, 9), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(SETS)), SETS, strict=True):
        shown = [each for each in found if each["bits"] and each.get(kind, {}).get("kl", 0) > 0]
        for rank, each in enumerate(sorted(shown, key=lambda each: (each["window"], each[kind]["kl"]))):
            _mark(axes, each, kind, left=bool(rank % 2))
        axes.set(yscale="log", xlabel="true bits per element", ylabel="KL, nats per token", title=kind)
        axes.grid(alpha=0.3)
        axes.margins(x=0.25)
    names = {family(each["scheme"]) for each in found}
    for name in (name for name in FAMILIES if name in names):
        figure.axes[0].scatter([], [], color=FAMILIES[name], label=name)
    figure.axes[0].scatter([], [], color="gray", marker=MARKERS[WINDOW], label="with its own window")
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=DPI)
    return path


def _mark(axes: Axes, each: dict[str, Any], kind: str, left: bool) -> None:
    """A point and, without a window, its name: on alternating sides, since neighbours in KL share their bits."""
    place = each["bits"]["true"], each[kind]["kl"]
    color = FAMILIES.get(family(each["scheme"]), FAMILIES["other"])
    axes.scatter(*place, color=color, marker=MARKERS[each["window"]], zorder=3)
    if each["window"] == CLOSED:
        name = each["scheme"].removeprefix("transformers-")
        where: dict[str, Any] = {"xytext": (-6 if left else 6, -3), "ha": "right" if left else "left"}
        axes.annotate(name, place, textcoords="offset points", fontsize="small", **where)


def draw_layers(layered: list[dict[str, Any]], path: Path) -> Path:
    """Attention KL by scheme and layer, without a window."""
    values = [[kl if kl > 0 else math.nan for kl in each["text"]["attention_kl"]] for each in layered]
    figure = Figure(figsize=(12, 1.5 + 0.3 * len(layered)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(values, aspect="auto", norm=LogNorm(vmin=1e-5, vmax=1.0), cmap="viridis")
    axes.set_yticks(range(len(layered)), [each["scheme"].removeprefix("transformers-") for each in layered])
    axes.set(xlabel="layer", title="attention KL on running text, no window")
    figure.colorbar(image, ax=axes, label="nats per query")
    figure.savefig(path, dpi=DPI)
    return path

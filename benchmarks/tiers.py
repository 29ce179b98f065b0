"""Would a tier of 8-bit codes between the exact window and the preset's bits pay? ``python -m benchmarks.tiers``.

A closed block is never quantized again, so a tier must keep what the final codes can be cut from. Two ways:

- ``truncate``: keep an 8-bit code and drop its low bits later. Cells of a grid nest, so this is exact; but 8-bit and
  b-bit grids want different steps. Either the 8-bit grid has its own best step, then the b-bit grid left after
  truncation is too wide; or its upper bits are the best b-bit grid, then the 8-bit codes clip where that one does.
  Measured: relative RMS of SmolLM2's rotated values, gain chosen per token as always.
- ``both``: store the final code beside the 8-bit one when the block closes and drop the 8-bit one later. No error at
  all; measured: bits per element of a whole cache against the same tokens in the window, in bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.common import describe_run, head_lines, make_parser, markdown_table, write_report
from benchmarks.replay import record
from benchmarks.samples import LENGTHS, NOVELS, text
from hf_kvquant import PRESETS
from hf_kvquant.exact import walsh_hadamard
from hf_kvquant.formats import MIDRISE_STEPS
from hf_kvquant.models import load_model

GAINS = (0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.4, 1.6, 2.0)
TIER, CONTEXTS = 256, (1024, 4096, 16384)


Grid = tuple[float, int]  # step and bits


def grid_error(units: torch.Tensor, grid: Grid, chosen_by: Grid | None = None) -> float:
    """Relative RMS on a mid-rise grid, under the gain per token that suits ``chosen_by`` best: two codes that are cut
    from one another share it."""
    rms = units.square().mean(-1, keepdim=True).sqrt()
    best, chosen = torch.full_like(rms, torch.inf), torch.zeros_like(units)
    for gain in GAINS:
        error = (on_grid(units, rms * gain, chosen_by or grid) - units).square().sum(-1, keepdim=True)
        chosen = torch.where(error < best, on_grid(units, rms * gain, grid), chosen)
        best = torch.minimum(error, best)
    return float(((chosen - units).square().sum() / units.square().sum()).sqrt())


def on_grid(units: torch.Tensor, gain: torch.Tensor, grid: Grid) -> torch.Tensor:
    step, half = gain * grid[0], 2 ** (grid[1] - 1)
    return ((units / step - 0.5).round().clamp(-half, half - 1) + 0.5) * step


def truncation(units: torch.Tensor) -> list[dict[str, Any]]:
    rows = []
    for bits in (2, 3, 4):
        own, wide, cut = (MIDRISE_STEPS[bits], bits), (MIDRISE_STEPS[8], 8), 2 ** (8 - bits)
        rows.append(
            {
                "bits": bits,
                "own grid": grid_error(units, own),
                "cut from the best 8-bit grid": grid_error(units, (wide[0] * cut, bits), wide),
                "8 bits, own grid": grid_error(units, wide),
                "8 bits whose upper bits are the own grid": grid_error(units, (own[0] / cut, 8), own),
            }
        )
    return rows


def both_codes() -> list[dict[str, Any]]:
    """Bits per element of a cache of cm3 with 256 tokens more in the window, in a tier that keeps both codes, or in
    neither."""
    low, high, window = 3.127, 8.127, PRESETS["cm3"].config.residual_length
    rows = []
    for context in CONTEXTS:
        older = context - window - TIER
        fixed = 16 * window + low * older
        rows.append(
            {
                "context": context,
                "window 128": (fixed + low * TIER) / context,
                "window 128, tier 256": (fixed + (low + high) * TIER) / context,
                "window 384": (fixed + 16 * TIER) / context,
            }
        )
    return rows


def main() -> None:
    options = make_parser("tiers", "Whether precision by age pays.", [], []).parse_args()
    model, tokenizer = load_model(options.model)
    sample = text(tokenizer, "tiers", max(LENGTHS), NOVELS[0], seed=1)
    with torch.inference_mode():
        updates = record(model, torch.tensor([sample.context]))
        units = walsh_hadamard(torch.stack([each.values[0, :, 4:] for each in updates]).float())
    report = describe_run("tiers", {"tokens": len(sample.context)}) | {"skipped": {}}
    report |= {"truncate": truncation(units), "both": both_codes()}
    lines = head_lines(report)
    for name in ("truncate", "both"):
        rows = report[name]
        cells = [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
        lines += [f"## {name}", *markdown_table(list(rows[0]), cells)]
    write_report(report, lines, options.json)


if __name__ == "__main__":
    main()

"""Widths per layer for SmolLM2, measured on the first half of the novels: ``python -m benchmarks.tune``.

``benchmarks.quality`` judges them on the second half. One JSON file per budget in ``benchmarks/tuned``, as
``KVQuantConfig.to_json`` writes it, with the preset's values beside the tuned keys.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.samples import LENGTHS, NOVELS, REPORT_SEED, text
from hf_kvquant import PRESETS, tuned_widths
from hf_kvquant.models import load_model

FOLDER = Path(__file__).parent / "tuned"
# name -> average bits of a key channel, preset whose values go with it
BUDGETS = {"cm4": (4.0, "cm4"), "cm3": (3.1875, "cm3"), "cm2": (2.21875, "cm2")}
PROMPTS = 4


def main() -> None:
    model, tokenizer = load_model()
    seed, length = REPORT_SEED + 1, max(LENGTHS)
    samples = [text(tokenizer, f"tune-{n}", length, NOVELS[n % len(NOVELS)], seed) for n in range(PROMPTS)]
    prompts = [torch.tensor([each.context]) for each in samples]
    FOLDER.mkdir(exist_ok=True)
    for name, (bits, values) in BUDGETS.items():
        config = replace(tuned_widths(model, prompts, bits), value=PRESETS[values].config.value)
        (FOLDER / f"{name}.json").write_text(config.to_json() + "\n")
        widths = [each.key.widths for each in config.layers.values() if each.key is not None]
        spent = [sum(b * n for b, n in each or ()) / 64 for each in widths]
        print(f"{name}: {sum(spent) / len(spent):.3f} bits, from {min(spent):.2f} to {max(spent):.2f} by layer")


if __name__ == "__main__":
    main()

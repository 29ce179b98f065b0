"""What every preset holds per token: ``python -m benchmarks.bytes_per_token``.

Decision: bytes do not depend on what the states say, so caches are filled as in ``benchmarks.attention_step``: random
bf16 states through ``update``, the model's own tables of cos and sin for those on an attached model. Every figure is
what a filled cache holds, window, sinks, tables and all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import attention_step
from benchmarks.common import (
    DTYPES,
    DYNAMIC,
    QUANTO,
    describe_run,
    head_lines,
    make_parser,
    markdown_table,
    write_report,
)
from hf_kvquant import PRESETS
from hf_kvquant.presets import UNATTACHED_PRESETS
from hf_kvquant.schemes import cache_nbytes

LENGTHS = (1024, 8192)
NAMES = (DYNAMIC, QUANTO, attention_step.HQQ, *PRESETS)


def run(bench: attention_step.Bench, names: list[str], lengths: list[int], path: Path) -> dict[str, Any]:
    """Fill each cache at each length and write the report."""
    report = describe_run("bytes_per_token", {"names": names, "lengths": lengths}) | {"skipped": {}, "rows": []}
    with torch.no_grad():
        for name in tqdm(names, unit="cache", disable=None):
            own = attention_step.Bench(bench.model, bench.attached, (scheme_of(name),))
            report["skipped"] |= own.skipped
            report["rows"] += [] if own.skipped else [held(own, name, tokens) for tokens in lengths]
    write_report(report, [*head_lines(report), *table(report["rows"], lengths)], path)
    return report


def scheme_of(name: str) -> str:
    """The step benchmark's name for it: presets that need an attached model are on one."""
    return name if name in UNATTACHED_PRESETS or name not in PRESETS else f"{attention_step.ATTACHED}{name}"


def held(bench: attention_step.Bench, name: str, tokens: int) -> dict[str, Any]:
    nbytes = cache_nbytes(bench.filled(tokens, 0)[scheme_of(name)])
    return {"scheme": name, "tokens": tokens, "nbytes": nbytes, "bytes_per_token": nbytes / tokens}


def table(rows: list[dict[str, Any]], lengths: list[int]) -> list[str]:
    found = {(row["scheme"], row["tokens"]): f"{row['bytes_per_token']:,.0f}" for row in rows}
    names = dict.fromkeys(row["scheme"] for row in rows)
    lines = [[f"`{name}`", *(found[name, tokens] for tokens in lengths)] for name in names]
    return markdown_table(["cache, bytes per token", *(f"T = {tokens:,}" for tokens in lengths)], lines)


def main() -> None:
    parser = make_parser("bytes_per_token", "Bytes that each cache holds per token.", NAMES, NAMES)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), metavar="T")
    options = parser.parse_args()
    run(attention_step.load(options.model, DTYPES[options.dtype], ()), options.schemes, options.lengths, options.json)


if __name__ == "__main__":
    main()

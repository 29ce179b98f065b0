"""The census of architectures as a report: JSON, Markdown, and lines for the terminal.

Decision: every form is made from one dictionary with the head of a benchmark's result file (date, command, versions),
so that they cannot disagree. Files appear as a whole or not at all.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_kvquant
from hf_kvquant.architectures import PASSING, TOLERANCE, VERDICTS, CensusError, Record

VERSIONS = {
    "python": platform.python_version(),
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "hf-kvquant": hf_kvquant.__version__,
}
METHOD = """\
Each causal-LM type of transformers is built with tiny random weights and run in fp32 on a left-padded batch of 2, a
prompt of 12 tokens and 40 single steps: with DynamicCache, and attached with a lossless cache that stores keys before
RoPE in blocks of 8 tokens. *Difference* is the largest of the logits, whose own spread is about 1. A cache spoilt on
purpose must move the logits of the next step, or the type counts as not compared. Layers are those of the type's
default configuration, one or more of each kind; a window over all layers is turned off where the type may lack it."""
COLUMNS = ("type", "class", "verdict", "layers", "difference", "reason")


def make_report(records: Iterable[Record], command: str) -> dict[str, Any]:
    rows = [dataclasses.asdict(record) for record in records]
    found = Counter(row["verdict"] for row in rows)
    return {
        "census": "architectures",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "versions": VERSIONS,
        "settings": {"tolerance": TOLERANCE, "dtype": "float32", "prompt": 12, "steps": 40, "left_padding": [0, 5]},
        "counts": {verdict: found[verdict] for verdict in VERDICTS},
        "passing": sum(found[verdict] for verdict in PASSING),
        "records": rows,
    }


def counts_line(report: dict[str, Any]) -> str:
    """How many types there are, how many pass, and how many have each verdict."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report["counts"].items())
    return f"{len(report['records'])} types, {report['passing']} within {TOLERANCE:g} of DynamicCache: {counts}."


def text_table(report: dict[str, Any]) -> str:
    """Type, verdict, layers or reason, one line per type, aligned."""
    width = max(len(row["model_type"]) for row in report["records"])
    names = max(map(len, VERDICTS))
    lines = []
    for row in report["records"]:
        parts = [row["layers"], row["reason"], "" if row["difference"] is None else f"{row['difference']:.1e}"]
        about = " | ".join(part for part in parts if part)
        lines.append(f"{row['model_type']:<{width}}  {row['verdict']:<{names}}  {about}")
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    head = [
        "# Architectures",
        "",
        f"`{report['command']}`, {report['date']}; {versions}.",
        "",
        counts_line(report),
        "",
        METHOD,
        "",
        *(f"- **{verdict}**: {meaning}." for verdict, meaning in VERDICTS.items()),
        "",
    ]
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_cells(row) for row in report["records"])]
    return "\n".join([*head, *(f"| {' | '.join(cells)} |" for cells in rows)]) + "\n"


def _cells(row: dict[str, Any]) -> Sequence[str]:
    difference = "" if row["difference"] is None else f"{row['difference']:.1e}"
    cells = (row["model_type"], row["class_name"], row["verdict"], row["layers"], difference, row["reason"])
    return [cell.replace("|", "\\|") for cell in cells]


def check_folder(path: Path) -> None:
    """CensusError now rather than after the census."""
    if not path.parent.is_dir():
        raise CensusError(f"{path} cannot be written: the folder {path.parent} does not exist; create it first")


def write(text: str, path: Path) -> None:
    """Replace ``path`` as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CensusError(f"{path} cannot be written: {error.strerror}; name another path") from error

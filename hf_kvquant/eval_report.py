"""``hf-kvquant eval-report``: runs side by side, as one table per task, pictures, and the data of both.

Decision: everything that is shown is kept in ``report.json``, without prompts and machine paths, and a report can be
made again from that file alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from math import exp
from pathlib import Path

from hf_kvquant.eval_results import (
    REPORT,
    RETRIEVAL,
    Estimate,
    Run,
    baseline,
    cells,
    estimate,
    load,
    paired,
    to_json,
)
from hf_kvquant.models import MissingPackageError
from hf_kvquant.schemes import EvalError

LEGEND = """\
Bits per key or value element of the longest cache, in the dtype of the run: *true* without window, sinks and unused
capacity, *all* with them. Differences are paired: to full precision, on the same documents, with standard errors."""


def make(paths: Sequence[Path], folder: Path, command: str) -> list[Path]:
    """Write ``report.json``, ``report.md`` and pictures of the results in ``paths`` into ``folder``; returns the files.
    ``command`` is shown as what made them.

    Raises:
        EvalError: as ``hf_kvquant.eval_results.load`` raises.
        MissingPackageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("pip install matplotlib", "It draws the pictures of the report.")
    from hf_kvquant.eval_plots import draw

    runs = load(paths)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvalError(
            f"--output {folder}: not a folder that can be written ({error.strerror}); name another"
        ) from error
    pictures = draw(runs, folder)
    data, text = folder / REPORT, folder / "report.md"
    data.write_text(to_json(runs, command))
    text.write_text(markdown(runs, command, [path.name for path in pictures]))
    return [data, text, *pictures]


def markdown(runs: Sequence[Run], command: str, pictures: Sequence[str]) -> str:
    """The report of ``runs`` as Markdown: ``command``, settings, a table per task, recall by length and depth, and the
    files in ``pictures``."""
    lines = ["# Evaluation", "", f"`{command}`", "", *_settings_lines(runs), "", LEGEND, ""]
    if others := sorted({task for run in runs for task, rows in run.samples.items() if not rows}):
        lines += [f"Not compared, metrics of other kinds: {', '.join(others)} (see lm-eval's own table).", ""]
    for task in _all_tasks(runs, retrieval=True):
        lines += [f"## {task}", "", *retrieval_table(runs, task), ""]
        lines += ["Recall by length and depth:", "", *cell_table(runs, task), ""]
    for task in _all_tasks(runs, retrieval=False):
        lines += [f"## {task}", "", *text_table(runs, task), ""]
    lines += [f"![{Path(name).stem}]({name})" for name in pictures]
    return "\n".join(lines) + "\n"


def _settings_lines(runs: Sequence[Run]) -> list[str]:
    """What all runs share in one line, and what sets single ones apart."""
    shared = {
        name: value for name, value in runs[0].settings.items() if all(r.settings.get(name) == value for r in runs)
    }
    lines = ["All: " + ", ".join(f"{name} {value}" for name, value in shared.items()) + "."]
    apart = [name for name in runs[0].settings if name not in shared]
    for run in runs if apart else ():
        lines.append(f"- `{run.label}`: " + ", ".join(f"{name} {run.settings.get(name)}" for name in apart))
    return lines


def _all_tasks(runs: Sequence[Run], retrieval: bool) -> list[str]:
    return list(dict.fromkeys(task for run in runs for task in run.tasks(retrieval)))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def _with_error(value: Estimate | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    error = "" if value.error is None else f" +- {value.error:.{digits}f}"
    return f"{value.mean:+.{digits}f}{error}"


def _head_cells(run: Run) -> list[str]:
    return [f"`{run.label}`", f"{run.true_bits:.2f}", f"{run.held['bits_per_element']:.2f}"]


def _difference(run: Run, runs: Sequence[Run], task: str, metric: str) -> Estimate | None:
    reference = baseline(run, runs)
    return None if reference is None or reference is run else paired(run, reference, [task], metric)


def retrieval_table(runs: Sequence[Run], task: str) -> list[str]:
    """Rows of a table of one ``task`` with answers: the four metrics of ``runs``, and paired differences of two to
    full precision."""
    head = ["cache", "true bits", "all bits", "documents", *(name.replace("_", " ") for name in RETRIEVAL)]
    head += ["answer nll, difference", "recall, difference"]
    rows = []
    for run in (run for run in runs if run.samples.get(task)):
        means = [estimate(run, [task], name) for name in RETRIEVAL]
        row = [*_head_cells(run), str(means[0].count), *(f"{mean.mean:.3f}" for mean in means)]
        for name in ("answer_nll", "recall"):
            row.append(_with_error(_difference(run, runs, task, name)))
        rows.append(row)
    return _table(head, rows)


def cell_table(runs: Sequence[Run], task: str) -> list[str]:
    """Rows of a table of recall in ``task`` by length and depth, one of each of ``runs``."""
    every = list(dict.fromkeys(cell for run in runs for cell in cells(run, [task])))
    rows = []
    for run in (run for run in runs if run.samples.get(task)):
        found = cells(run, [task])
        row = [Estimate.of(each["recall"] for each in found[cell]).mean if cell in found else None for cell in every]
        rows.append([f"`{run.label}`", *("-" if value is None else f"{value:.2f}" for value in row)])
    return _table(["cache", *(f"{length:,} at {depth:.3g}" for length, depth in every)], rows)


def text_table(runs: Sequence[Run], task: str) -> list[str]:
    """Rows of a table of one ``task`` of running text: perplexity and bits per byte of ``runs``, and the paired
    difference of nll to full precision, in nats per token and as percent of perplexity."""
    head = [
        "cache",
        "true bits",
        "all bits",
        "passages",
        "perplexity",
        "bits per byte",
        "nll, difference",
        "perplexity",
    ]
    rows = []
    for run in (run for run in runs if run.samples.get(task)):
        nll, bits = estimate(run, [task], "nll"), estimate(run, [task], "bits_per_byte")
        difference = _difference(run, runs, task, "nll")
        change = "-" if difference is None else f"{100 * (exp(difference.mean) - 1):+.2f}%"
        row = [str(nll.count), f"{exp(nll.mean):.2f}", f"{bits.mean:.4f}", _with_error(difference, 4), change]
        rows.append([*_head_cells(run), *row])
    return _table(head, rows)

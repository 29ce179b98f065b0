"""Result files of lm-eval, joined by scheme, and what is compared between schemes.

Decision: schemes are compared sample by sample. A difference to full precision is taken on the same document and then
averaged, so that what makes a document hard for both cancels out; lm-eval's own averages cannot do that, so the logged
samples are read. Standard errors take samples as independent; questions on one haystack are not quite that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hf_kvquant.schemes import FULL_PRECISION, EvalError, as_json
from hf_kvquant.spec import first_line

RETRIEVAL = ("exact_match", "recall", "token_accuracy", "answer_nll")
TEXT = ("nll", "bits_per_byte")
PLACE = ("length", "depth", "index")
DOCUMENT = "document"  # start of lm-eval's hash: pairs are of equal documents, whatever grid or seed drew them
SAME = ("model", "dtype", "chat_template")  # settings that a run shares with what it is compared with
REPORT = "report.json"

Row = dict[str, Any]


@dataclass
class Run:
    """One scheme on one model, read in one way.

    Attributes:
        scheme: its name, without folder and suffix where it came from a file.
        settings: what else its results depend on.
        held: the longest cache of the run: tokens, bytes, bits per element.
        samples: by task, one row per document: where it stands in the grid and what it scored; none of tasks whose
            metrics are not compared.
        label: the scheme, with the settings that tell it from other runs of the same.
    """

    scheme: str
    settings: dict[str, Any]
    held: dict[str, Any]
    samples: dict[str, list[Row]] = field(default_factory=dict)
    label: str = ""

    def __post_init__(self) -> None:
        self.label = self.label or self.scheme

    @property
    def key(self) -> str:
        """One text for scheme and settings: results of equal keys are joined."""
        return as_json([self.scheme, self.settings])

    @property
    def true_bits(self) -> float:
        """Bits per element of the longest cache, without window, sinks and unused capacity."""
        return self.held["true_bits_per_element"]

    def tasks(self, retrieval: bool) -> list[str]:
        """Tasks of one sort: with ``retrieval`` those with answers to find, else those of running text."""
        return [task for task, rows in self.samples.items() if rows and ("answer_nll" in rows[0]) == retrieval]


@dataclass(frozen=True)
class Estimate:
    """A mean.

    Attributes:
        mean: of the values.
        error: its standard error; None from a single value.
        count: number of values.
    """

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        """From at least one of ``values``, taken as independent."""
        values = list(values)
        return cls(fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None, len(values))


def load(paths: Sequence[Path]) -> list[Run]:
    """All runs in result files; those of one scheme and setting joined.

    Args:
        paths: result files of lm-eval, folders of them, or reports written before.

    Raises:
        EvalError: nothing found, a file that is none of ours, no logged samples, or two results for one document.
    """
    runs: dict[str, Run] = {}
    for file in _files(paths):
        for run in _read(file):
            _join(runs.setdefault(run.key, Run(run.scheme, run.settings, run.held)), run)
    for run in runs.values():
        run.samples = {task: sorted(rows, key=_place) for task, rows in sorted(run.samples.items())}
    found = sorted(runs.values(), key=lambda run: (run.scheme != FULL_PRECISION, -run.true_bits, run.scheme))
    if not any(rows for run in found for rows in run.samples.values()):
        raise EvalError(
            f"{', '.join(map(str, paths))}: no results of kvq_longctx or kvq_perplexity, which are compared; run those"
        )
    _tell_apart(found)
    return found


def _tell_apart(runs: Sequence[Run]) -> None:
    """Runs of one scheme under different settings get those into their labels."""
    for scheme in {run.scheme for run in runs}:
        same = [run for run in runs if run.scheme == scheme]
        differing = [name for name in same[0].settings if len({str(run.settings.get(name)) for run in same}) > 1]
        for run in same:
            named = ", ".join(f"{name} {run.settings.get(name)}" for name in differing)
            if named:
                run.label = f"{scheme} ({named})"


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = [*path.rglob("results_*.json"), *path.rglob(REPORT)] if path.is_dir() else [path]
        if not path.exists() or not inside:
            raise EvalError(f"{path}: no results_*.json and no {REPORT} there; name what --output_path named")
        found += sorted(inside)
    return found


def _read(file: Path) -> list[Run]:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EvalError(f"{file}: not readable as JSON ({first_line(error)}); leave it out, or run it again") from error
    try:
        if "runs" not in data:
            return [_of_results(file, data)]
        return [
            Run(**{**each, "samples": {task: _rows(table) for task, table in each["samples"].items()}})
            for each in data["runs"]
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise EvalError(
            f"{file}: not a result of the model type hf-kvquant, nor a report of it; leave it out"
        ) from error


def to_json(runs: Sequence[Run], command: str) -> str:
    """``runs`` and the ``command`` that shows them as the text of a report, which ``load`` reads again: samples as
    tables, one document a line."""
    tables = [
        {
            "scheme": run.scheme,
            "settings": run.settings,
            "held": run.held,
            "samples": {task: _table(rows) for task, rows in run.samples.items()},
        }
        for run in runs
    ]
    text = json.dumps({"command": command, "runs": tables}, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda innermost: " ".join(innermost[0].split()), text) + "\n"


def _table(rows: Sequence[Row]) -> dict[str, list[Any]]:
    return {"columns": list(rows[0]) if rows else [], "rows": [list(row.values()) for row in rows]}


def _rows(table: dict[str, list[Any]]) -> list[Row]:
    return [dict(zip(table["columns"], values, strict=True)) for values in table["rows"]]


def _of_results(file: Path, data: dict[str, Any]) -> Run:
    config = data["config"]
    model_args = config["model_args"] if isinstance(config["model_args"], dict) else {}
    settings = {
        "model": Path(str(model_args.get("pretrained", data.get("model_name", "")))).name,
        "dtype": str(config["model_dtype"]).removeprefix("torch."),
        "chat_template": bool(data.get("chat_template")),
        "residual_length": config["kv_scheme"].get("residual_length"),
        "attached": config["kv_attached"],
        **{name: config[f"kv_{name}"] for name in ("prefill", "prefill_tail", "score_chunk")},
        "lm_eval": data.get("lm_eval_version"),
        "transformers": data.get("transformers_version"),
    }
    names = ("tokens", "cache_nbytes", "bits_per_element", "true_bits_per_element", "block_bits_per_element")
    if config["kv_tokens"] == 0:
        raise EvalError(f"{file}: nothing was read in that run, its answers came from --use_cache; name the first run")
    held = {name: config[f"kv_{name}"] for name in names}
    run = Run(Path(config["kv_cache"]).stem, settings, held)
    stamp = file.stem.removeprefix("results_")
    for task in data["configs"]:
        logged = file.with_name(f"samples_{task}_{stamp}.jsonl")
        if not logged.exists():
            raise EvalError(f"{file}: no samples of {task} beside it; run with --log_samples")
        rows = [_row(json.loads(line)) for line in logged.read_text().splitlines()]
        run.samples[task] = [row for row in rows if row.keys() >= {*RETRIEVAL} or row.keys() >= {*TEXT}]
    return run


def _row(sample: dict[str, Any]) -> Row:
    """What is kept of a logged sample; six digits are far below any standard error."""
    place = {name: sample["doc"][name] for name in PLACE if name in sample["doc"]}
    place[DOCUMENT] = sample["doc_hash"][:12]
    return place | {name: round(sample[name], 6) for name in (*RETRIEVAL, *TEXT) if name in sample}


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name, 0) for name in (*PLACE, DOCUMENT))


def _join(whole: Run, part: Run) -> None:
    if part.held["tokens"] > whole.held["tokens"]:
        whole.held = part.held
    for task, rows in part.samples.items():
        known = {_place(row): row for row in whole.samples.setdefault(task, [])}
        for row in rows:
            if known.get(_place(row), row) != row:
                raise EvalError(f"{whole.scheme}: two different results for {task} at {_place(row)}; report them apart")
            if _place(row) not in known:
                whole.samples[task].append(row)


# ---------------------------------------------------------------- comparison


def baseline(run: Run, runs: Sequence[Run]) -> Run | None:
    """The one of ``runs`` in full precision that ``run`` is compared with: of the same model, dtype and chat template,
    and as much like it otherwise as there is; None where there is none, itself where it is one."""

    def alike(other: Run) -> int:
        return sum(other.settings.get(name) == value for name, value in run.settings.items())

    def fits(other: Run) -> bool:
        return other.scheme == FULL_PRECISION and all(
            other.settings.get(name) == run.settings.get(name) for name in SAME
        )

    return max(filter(fits, runs), key=alike, default=None)


def compared(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Every one of ``runs`` that has another for a baseline, and that."""
    pairs = ((run, baseline(run, runs)) for run in runs)
    return [(run, reference) for run, reference in pairs if reference is not None and reference is not run]


def estimate(run: Run, tasks: Iterable[str], metric: str, keep: Callable[[Row], bool] = lambda row: True) -> Estimate:
    """Mean of ``metric`` over the documents of ``tasks`` in ``run`` that ``keep`` keeps (all)."""
    return Estimate.of(row[metric] for task in tasks for row in run.samples.get(task, []) if keep(row))


def paired(run: Run, reference: Run, tasks: Iterable[str], metric: str) -> Estimate | None:
    """Mean difference in ``metric`` of ``run`` to ``reference``, on the documents of ``tasks`` that both have; None
    where there are none."""
    differences = []
    for task in tasks:
        known = {_place(row): row[metric] for row in reference.samples.get(task, [])}
        rows = (row for row in run.samples.get(task, []) if _place(row) in known)
        differences += [row[metric] - known[_place(row)] for row in rows]
    return Estimate.of(differences) if differences else None


def cells(run: Run, tasks: Iterable[str]) -> dict[tuple[int, float], list[Row]]:
    """Rows of ``tasks`` in ``run`` by (length in tokens, depth from 0 to 1)."""
    found: dict[tuple[int, float], list[Row]] = {}
    for task in tasks:
        for row in run.samples.get(task, []):
            found.setdefault((row["length"], row["depth"]), []).append(row)
    return dict(sorted(found.items()))

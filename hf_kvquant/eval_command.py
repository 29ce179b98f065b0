"""``hf-kvquant eval``: lm-eval's own command line with our model type registered and our tasks found.

Decision: nothing of lm-eval's command line is copied. Its parser reads the arguments, four of them are filled in, and
its own code runs. Filled in are the model type ``hf-kvquant``, our task folder before the user's, SmolLM2 where no
model is named, and the fact of a chat template, which tasks need to know to count tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_kvquant.eval_register import MODEL_TYPE, register
from hf_kvquant.models import SMOLLM2, MissingPackageError
from hf_kvquant.schemes import EvalError
from hf_kvquant.spec import first_line

# Of our tasks (longctx_task.documents); others may read other names.
_METADATA = ("max_seq_lengths", "depths", "samples_per_cell", "data_seed", "tokenizer")
# What lm-eval says of a request that it cannot run, where it raises instead of exiting.
_REFUSALS = (
    "Attempted to load model",
    "Tasks not found",
    "Need to specify task",
    "Specify --output_path",
    "If --samples",
    "No tasks specified",
)


def tasks_path() -> Path:
    """The folder of our tasks: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "_tasks"
    return installed if installed.is_dir() else package.parent / "eval" / "tasks"


def run(arguments: Sequence[str]) -> None:
    """Run lm-eval with these command line arguments.

    Raises:
        MissingPackageError: lm-eval is not installed.
        EvalError: the request cannot be met.
        SystemExit: from lm-eval's parser, on wrong options and after ``--help``.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError(
            "pip install 'lm_eval[hf]>=0.4.13' datasets matplotlib",
            "lm-eval is the harness that runs evaluations; the extra eval of this package brings the same.",
        )
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    register()
    with _command_line(arguments):
        harness = HarnessCLI()
        parsed = harness.parse_args()
    _fill_in(parsed)
    try:
        harness.execute(parsed)
    except (ValueError, KeyError) as error:
        if isinstance(error, EvalError) or not str(error).strip("'\"").startswith(_REFUSALS):
            raise
        raise EvalError(str(error).strip().splitlines()[0]) from error


@contextlib.contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """lm-eval's parser reads ``sys.argv`` and puts its default command into it."""
    before = sys.argv
    sys.argv = ["hf-kvquant eval", *arguments]
    try:
        yield
    finally:
        sys.argv = before


def _fill_in(parsed: argparse.Namespace) -> None:
    given = _given(parsed)
    if hasattr(parsed, "include_path"):
        own = given.get("include_path") or []
        own = [own] if isinstance(own, str | Path) else own
        if missing := [path for path in own if not Path(path).is_dir()]:
            raise EvalError(f"--include_path {missing[0]}: no such folder; name one, or leave it out")
        parsed.include_path = [str(tasks_path()), *own]
    if parsed.command != "run":
        return
    if given.get("cache_requests"):
        raise EvalError(
            "--cache_requests: its cache does not know --metadata and would hand out other prompts; leave it out"
        )
    if (limit := given.get("limit")) is not None and limit <= 0:
        raise EvalError(f"--limit {limit:g}: give one above 0")
    settings: dict[str, Any] = {"chat_template": bool(given.get("apply_chat_template"))}
    named = _mapping(given.get("metadata"))
    _refuse_near_misses(named)
    parsed.metadata = settings | named
    parsed.model = given.get("model") or MODEL_TYPE
    if parsed.model == MODEL_TYPE:
        arguments = _mapping(given.get("model_args"))
        for name in ("device", "batch_size", "max_batch_size"):
            if name in arguments:
                raise EvalError(f"model_args: {name} is an option of its own; give --{name} {arguments[name]}")
        parsed.model_args = {"pretrained": SMOLLM2} | arguments


def _refuse_near_misses(metadata: dict[str, Any]) -> None:
    """lm-eval hands any name on, and a mistyped one would run the default grid without a word."""
    for name in metadata:
        close = difflib.get_close_matches(name, _METADATA, n=1, cutoff=0.85)
        if close and close[0] != name:
            raise EvalError(f"--metadata {name}={metadata[name]}: no task reads that; write {close[0]}")


def _given(parsed: argparse.Namespace) -> dict[str, Any]:
    """What the command line says, and what it leaves to the file of ``--config``, as lm-eval joins the two."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    file = getattr(parsed, "config", None)
    try:
        written = EvaluatorConfig.load_yaml_config(file) if file else {}
    except (OSError, TypeError, ValueError) as error:
        raise EvalError(f"--config {file}: {first_line(error)}; name a YAML file") from error
    return written | {name: value for name, value in vars(parsed).items() if value or value == 0}


def _mapping(value: Any) -> dict[str, Any]:
    """Arguments of ``--config`` may be one string, "a=1,b=2"."""
    from lm_eval.utils import simple_parse_args_string

    return simple_parse_args_string(value) if isinstance(value, str) else dict(value or {})

"""``hf-kvquant eval``: lm-eval's own command line with our model type registered and our tasks found.

Decision: nothing of lm-eval's command line is copied. Its parser reads the arguments, four of them are filled in, and
its own code runs. Filled in are the model type ``hf-kvquant``, our task folder before the user's, SmolLM2 where no
model is named, and the fact of a chat template, which tasks need to know to count tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_kvquant.eval_register import MODEL_TYPE, register
from hf_kvquant.models import SMOLLM2, MissingPackageError
from hf_kvquant.schemes import EvalError

# What lm-eval says of a request that it cannot run, where it raises instead of exiting.
_REFUSALS = ("Tasks not found", "Need to specify task", "Specify --output_path", "If --samples", "No tasks specified")


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
            "pip install 'hf-kvquant[eval]'", "This extra brings lm-eval, the harness that runs evaluations."
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
    if hasattr(parsed, "include_path"):
        own = [] if parsed.include_path is None else [parsed.include_path]
        parsed.include_path = [str(tasks_path()), *own]
    if parsed.command != "run":
        return
    if parsed.cache_requests:
        raise EvalError(
            "--cache_requests: its cache does not know --metadata and would hand out other prompts; leave it out"
        )
    settings: dict[str, Any] = {"chat_template": bool(getattr(parsed, "apply_chat_template", False))}
    parsed.metadata = settings | (parsed.metadata or {})
    if parsed.model is None and parsed.config is None:
        parsed.model = MODEL_TYPE
    if parsed.model == MODEL_TYPE:
        parsed.model_args = {"pretrained": SMOLLM2} | (parsed.model_args or {})

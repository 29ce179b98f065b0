"""The C++ compiler that decode attention needs: whether there is one, what a person sees while it works, and how it
fails."""

from __future__ import annotations

import functools
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from tqdm import tqdm

from hf_kvquant.spec import first_line


@functools.cache
def compiler() -> str:
    """The C++ compiler that inductor would use; empty if there is none."""
    try:
        name = get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError):
        return ""
    return name if shutil.which(name) else ""


class CompilationError(RuntimeError):
    """Decode attention cannot be compiled."""


def failure_of(error: Exception) -> CompilationError:
    """What is raised for an ``error`` of the compiler."""
    failure = CompilationError(
        f"decode attention cannot be compiled here: {first_line(error)[:200]}; mend that, or choose backend='full'"
    )
    failure.__cause__ = error
    return failure


@contextmanager
def notice(what: str) -> Iterator[None]:
    """One line on stderr while ``what`` is compiled or loaded; on a terminal with the seconds passing."""
    label = f"hf-kvquant: compiling decode attention {what}, kept on disk"
    if not sys.stderr.isatty():
        tqdm.write(label, file=sys.stderr)
        yield
        return
    with tqdm(total=None, desc=label, bar_format="{desc}: {elapsed}", leave=False, delay=1.0) as bar:
        done = threading.Event()
        ticker = threading.Thread(target=_tick, args=(bar, done), daemon=True)
        ticker.start()
        try:
            yield
        finally:
            done.set()
            ticker.join()


def _tick(bar: tqdm, done: threading.Event) -> None:
    while not done.wait(0.5):
        bar.refresh()

"""Decode attention over packed codes: ``python -m benchmarks.attention``.

Three parts: ``op`` (one layer against attention over full tensors), ``step`` (a whole decode step with each cache),
``memory`` (peak extra memory); see :mod:`benchmarks.attention_op`, ``attention_step``, ``attention_memory``.

Decisions:
- Every thread count and dtype runs in a process of its own: compiled code is made for one number of threads, and the
  memory that the last run left behind does not decide where the next one's tensors lie.
- The result file is a list of groups (part, threads, dtype, shape or length). A run replaces those it measures, one by
  one, and keeps the others with their date and command: the whole takes a quarter of an hour, a part of it minutes.
  ``--resume`` measures only what is not there yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import attention_memory, attention_op, attention_step
from benchmarks.attention_op import Shape
from benchmarks.attention_summary import Group, check_targets, summarize, to_markdown
from benchmarks.common import DTYPES, RESULTS, describe_run, load_average, write_report
from hf_kvquant.spec import first_line

REPORT = RESULTS / "attention.json"
PARTS = ("op", "step", "memory")
USED_DTYPES = ("float32", "bfloat16")
OP_ROUNDS, QUICK_ROUNDS = 15, 3
OP_LENGTHS, MEMORY_LENGTHS = (16384,), (4096, 16384)
QUICK_LENGTHS = {"op": (2048,), "step": (64, 1024), "memory": (1024, 2048)}
QUICK_SCHEMES = (attention_step.INCUMBENTS[0], "attached-cr4")
IDENTITY = ("part", "threads", "dtype", "place", "scheme")


@dataclass(frozen=True)
class Job:
    """A group to be measured."""

    identity: Group
    measure: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Settings:
    """What is measured in this process; ``lengths`` None: those of each part."""

    parts: tuple[str, ...]
    threads: int
    dtype: str
    lengths: tuple[int, ...] | None
    quick: bool
    model: str | None

    def lengths_of(self, part: str) -> tuple[int, ...]:
        usual = {"op": OP_LENGTHS, "step": attention_step.LENGTHS, "memory": MEMORY_LENGTHS}
        return self.lengths or (QUICK_LENGTHS if self.quick else usual)[part]

    def identity(self, part: str, place: str, **more: Any) -> Group:
        return {"part": part, "threads": self.threads, "dtype": self.dtype, "place": place, **more}


def jobs_of(settings: Settings, skipped: dict[str, str]) -> Iterator[Job]:
    """Every group; ``skipped`` takes the schemes that do not run here, with the reason."""
    if "op" in settings.parts:
        yield from _op_jobs(settings)
    if "memory" in settings.parts:
        yield from _memory_jobs(settings)
    if "step" in settings.parts:
        yield from _step_jobs(settings, skipped)


def _op_jobs(settings: Settings) -> Iterator[Job]:
    rounds, dtype = QUICK_ROUNDS if settings.quick else OP_ROUNDS, DTYPES[settings.dtype]
    for tokens in settings.lengths_of("op"):
        for shape, formats in attention_op.groups_of(tokens, settings.quick):
            identity = settings.identity("op", str(shape))
            yield Job(
                identity, lambda shape=shape, formats=formats: attention_op.measure(shape, formats, dtype, rounds)
            )


def _memory_jobs(settings: Settings) -> Iterator[Job]:
    dtype, shapes = DTYPES[settings.dtype], [Shape(8, 4, 128, tokens) for tokens in settings.lengths_of("memory")]

    def rows(name: str) -> dict[str, Any]:
        measured = [(shape.tokens, attention_memory.measure(shape, name, dtype)) for shape in shapes]
        return {"rows": [{"tokens": tokens} | row for tokens, row in measured]}

    for name in attention_memory.FORMATS[: 1 if settings.quick else None]:
        yield Job(settings.identity("memory", "H=32 K=8 D=128", scheme=name), lambda name=name: rows(name))


def _step_jobs(settings: Settings, skipped: dict[str, str]) -> Iterator[Job]:
    names = QUICK_SCHEMES if settings.quick else (*attention_step.INCUMBENTS, *attention_step.OURS)
    loaded: list[attention_step.Bench] = []

    def measure(tokens: int) -> dict[str, Any]:
        if not loaded:
            loaded.append(attention_step.load(settings.model, DTYPES[settings.dtype], names))
            skipped.update(loaded[0].skipped)
        rounds = QUICK_ROUNDS if settings.quick else attention_step.rounds_of(tokens)
        return {"tokens": tokens} | loaded[0].measure(tokens, rounds)

    for tokens in settings.lengths_of("step"):
        yield Job(settings.identity("step", f"T={tokens}"), lambda tokens=tokens: measure(tokens))


def run(settings: Settings, path: Path, resume: bool = False) -> dict[str, Any]:
    """Measure, write the report after every group and return it."""
    torch.set_num_threads(settings.threads)
    stored = json.loads(path.read_text())["groups"] if path.exists() else []
    report = describe_run("attention", vars(settings)) | {"skipped": {}, "groups": stored}
    with torch.no_grad():
        for job in jobs_of(settings, report["skipped"]):
            if not (resume and any(_same(group, job.identity) for group in report["groups"])):
                _measure(job, report)
                _save(report, path)
    report["cells"] = summarize(report["groups"])
    report["targets"] = check_targets(report["cells"])
    _save(report, path)
    write_report(report, to_markdown(report), path)
    return report


def _measure(job: Job, report: dict[str, Any]) -> None:
    """Into the report; what fails is listed there with the error, and the others go on."""
    name = " ".join(map(str, job.identity.values()))
    print(name, file=sys.stderr)
    try:
        measured = job.measure()
    except RuntimeError as error:
        report["skipped"][name] = f"failed: {first_line(error)}"
        return
    report["skipped"] |= {f"{name} {scheme}": reason for scheme, reason in measured.pop("failed", {}).items()}
    _store(report, job.identity | measured)


def _same(group: Group, identity: Group) -> bool:
    return all(group.get(key) == identity.get(key) for key in IDENTITY)


def _store(report: dict[str, Any], group: Group) -> None:
    """The group in place of the one measured before, or in its order among the others."""
    group |= {"command": report["command"], "date": report["date"], "load_average": load_average()}
    others = [each for each in report["groups"] if not _same(each, group)]
    report["groups"] = sorted([*others, group], key=_order)


def _order(group: Group) -> tuple[Any, ...]:
    return PARTS.index(group["part"]), group["threads"], USED_DTYPES.index(group["dtype"]), group.get("tokens", 0)


def _save(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description="Decode attention over packed codes: time and memory."
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--dtype", nargs="+", choices=USED_DTYPES, default=list(USED_DTYPES))
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T", help="tokens (default: those of each part)")
    parser.add_argument("--quick", action="store_true", help="short, few schemes: to see that it runs; decides nothing")
    parser.add_argument("--resume", action="store_true", help="keep what the result file already holds")
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--json", type=Path, default=REPORT, metavar="PATH")
    return parser.parse_args(arguments)


def command_of(options: argparse.Namespace, threads: int, dtype: str) -> list[str]:
    """The command that measures one thread count and dtype."""
    command = [sys.executable, "-m", "benchmarks.attention", "--part", *options.part]
    command += ["--threads", str(threads), "--dtype", dtype]
    command += ["--json", str(options.json)] if options.json != REPORT else []
    command += ["--lengths", *map(str, options.lengths)] if options.lengths else []
    command += ["--model", options.model] if options.model else []
    return command + [f"--{name}" for name in ("quick", "resume") if getattr(options, name)]


def main() -> None:
    options = parse()
    places = [(threads, dtype) for threads in options.threads for dtype in options.dtype]
    if len(places) > 1:
        for threads, dtype in places:
            subprocess.run(command_of(options, threads, dtype), check=True)
        return
    ((threads, dtype),) = places
    lengths = tuple(options.lengths) if options.lengths else None
    settings = Settings(tuple(options.part), threads, dtype, lengths, options.quick, options.model)
    run(settings, options.json, options.resume)


if __name__ == "__main__":
    main()

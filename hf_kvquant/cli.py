"""The command ``hf-kvquant``: the only module that prints.

Exit codes: 0 done, 1 a package is missing (the line that installs it is printed), 2 the request cannot be met.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from hf_kvquant import __version__, eval_command, eval_report
from hf_kvquant.architectures import CensusError, check, choose_types
from hf_kvquant.census_report import check_folder, counts_line, make_report, markdown, text_table, write
from hf_kvquant.demo import DTYPES, DemoError, DemoSettings, format_table, run
from hf_kvquant.models import SMOLLM2, MissingPackageError
from hf_kvquant.presets import PRESETS
from hf_kvquant.schemes import EvalError

LEGEND = """\
cache bytes: all that a cache holds after the answer; ratio: to DynamicCache; s/token: median of the decoding steps.
One question is an illustration, not a measurement: another --seed may turn one answer or the other."""
USAGE = """\
In your own code:
    from hf_kvquant import QuantizedKVCache, attach
    with attach(model):   # the presets cr4, cm*, *-pre need it; for others leave it out
        cache = QuantizedKVCache(model.config, "cm3")
        model.generate(**inputs, past_key_values=cache)   # transformers >= 5.24: cache=cache
To read next: `hf-kvquant presets` (when to use which), README.md (measured quality, limits, your own formats)."""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["eval"]:  # lm-eval's own parser reads the rest
            eval_command.run(given[1:])
            return 0
        arguments = _parser().parse_args(given)
        arguments.command = " ".join(["hf-kvquant", *given])
        return arguments.run(arguments)
    except MissingPackageError as error:
        print(error)
        return 1
    except (DemoError, CensusError, EvalError) as error:
        print(f"hf-kvquant: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-kvquant", description="Quantized KV caches for Transformers.")
    parser.add_argument("--version", action="version", version=f"hf-kvquant {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="hide a fact in a text, ask for it, compare caches"))
    _add_architectures(commands.add_parser("architectures", help="run a tiny model of every type, with this cache"))
    commands.add_parser("eval", help="lm-eval's command line, every request through a cache (eval --help)")
    _add_report(commands.add_parser("eval-report", help="tables and pictures of results of eval"))
    presets = commands.add_parser("presets", help="list the presets and when to use them")
    presets.set_defaults(run=_presets)
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    default = DemoSettings()
    names = ",".join(default.presets)
    demo.set_defaults(run=_demo)
    demo.add_argument("--model", metavar="NAME", help=f"hub id or folder (default: {SMOLLM2}, no hub needed)")
    demo.add_argument("--tokens", type=int, default=default.tokens, help="prompt length (default: %(default)s)")
    demo.add_argument("--presets", default=names, help="comma-separated (default: %(default)s)")
    demo.add_argument("--dtype", choices=list(DTYPES), default=default.dtype, help="(default: %(default)s)")
    demo.add_argument("--new-tokens", type=int, default=default.new_tokens, help="answer length (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=default.seed, help="another fact and passage (default: %(default)s)")
    demo.add_argument("--device", default=default.device, help="cpu, cuda, cuda:1, ... (default: %(default)s)")


def _add_architectures(architectures: argparse.ArgumentParser) -> None:
    architectures.set_defaults(run=_architectures)
    architectures.add_argument("--types", nargs="+", default=[], metavar="TYPE", help="model types (default: all)")
    architectures.add_argument("--output", type=Path, metavar="PATH", help="write the table there, as Markdown")
    architectures.add_argument("--json", type=Path, metavar="PATH", help="write the same there, as JSON")


def _add_report(report: argparse.ArgumentParser) -> None:
    report.set_defaults(run=_report)
    report.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="what eval's --output_path named")
    report.add_argument(
        "--output", type=Path, default=Path("eval-report"), metavar="FOLDER", help="(default: %(default)s)"
    )


def _demo(arguments: argparse.Namespace) -> int:
    settings = DemoSettings(
        model=arguments.model,
        tokens=arguments.tokens,
        presets=tuple(name.strip() for name in arguments.presets.split(",") if name.strip()),
        dtype=arguments.dtype,
        new_tokens=arguments.new_tokens,
        seed=arguments.seed,
        device=arguments.device,
    )
    prompt, rows = run(settings)
    print(f"{arguments.model or SMOLLM2} ({arguments.dtype}) reads {len(prompt):,} tokens of Jane Austen's Persuasion")
    print(f'and is asked for one sentence that was hidden in them: "{prompt.fact}"\n')
    print(format_table(rows))
    print(f"\n{LEGEND}\n\n{USAGE}")
    return 0


def _architectures(arguments: argparse.Namespace) -> int:
    types = choose_types(arguments.types)
    for path in (arguments.output, arguments.json):
        if path is not None:
            check_folder(path)
    report = make_report([check(name) for name in tqdm(types, unit="type", disable=None)], arguments.command)
    print(text_table(report))
    print(f"\n{counts_line(report)}")
    if arguments.output is not None:
        write(markdown(report), arguments.output)
    if arguments.json is not None:
        write(json.dumps(report, indent=1) + "\n", arguments.json)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    for path in eval_report.make(arguments.results, arguments.output, arguments.command):
        print(path)
    return 0


def _presets(_: argparse.Namespace) -> int:
    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        print(f"{name:<{width}}  {preset.description}")
    return 0

"""What the benchmarks share: the caches they compare, a forward, the machine they ran on, and how results are kept.

Decision: a scheme is a name and a function that builds an empty cache; a benchmark knows nothing else about a cache.
A scheme that cannot run here is reported with the reason, never left out in silence.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache
from transformers.utils.import_utils import is_hqq_available, is_optimum_quanto_available

from hf_kvquant import PRESETS, KVQuantConfig, QuantizedKVCache, TensorSpec
from hf_kvquant._compat import cache_argument
from hf_kvquant.presets import UNATTACHED_PRESETS
from hf_kvquant.schemes import find_ninja
from hf_kvquant.spec import first_line

RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKAGES = ("torch", "transformers", "hf-kvquant", "optimum-quanto", "hqq")
QUANTO, DYNAMIC = "transformers-quanto4", "dynamic"


@dataclass(frozen=True)
class Scheme:
    """A cache to compare: ``build(model config, most tokens it will hold)`` gives an empty one."""

    name: str
    build: Callable[[Any, int], Cache]
    package: str | None = None
    is_installed: Callable[[], bool] = lambda: True


def _ours(name: str, quantization: KVQuantConfig | None = None) -> Scheme:
    return Scheme(name, lambda config, length: QuantizedKVCache(config, quantization or name))


INCUMBENTS = (
    Scheme(DYNAMIC, lambda config, length: DynamicCache(config=config)),
    Scheme("static", lambda config, length: StaticCache(config=config, max_cache_len=length)),
    Scheme(
        QUANTO,
        lambda config, length: QuantizedCache("quanto", config, nbits=4),
        "optimum-quanto",
        is_optimum_quanto_available,
    ),
    Scheme(
        "transformers-hqq4",
        lambda config, length: QuantizedCache("hqq", config, nbits=4, axis_key=1, axis_value=1),
        "hqq",
        is_hqq_available,
    ),
    Scheme("transformers-fp8", lambda config, length: QuantizedCache("fp8", config)),
)
# Other ways to spend bits around the default preset, to see what its agreement with full precision is limited by.
_DEFAULT = PRESETS["k4v4"].config
VARIANTS = {
    "k4v4-group32": replace(_DEFAULT, key=TensorSpec(group_size=32), value=TensorSpec(axis="token", group_size=32)),
    "k4v4-window512": replace(_DEFAULT, residual_length=512),
    "k4v8": replace(_DEFAULT, value=TensorSpec("int8", "token")),
    "k8v4": replace(_DEFAULT, key=TensorSpec("int8")),
}
SCHEMES = {
    scheme.name: scheme
    for scheme in (*INCUMBENTS, *map(_ours, UNATTACHED_PRESETS), *(_ours(*item) for item in VARIANTS.items()))
}


def choose_schemes(names: Iterable[str], config: Any) -> tuple[list[Scheme], dict[str, str]]:
    """The schemes that run here, warmed up, and for each other one the reason why it does not."""
    chosen, skipped = [], {}
    for name in names:
        if name not in SCHEMES:
            raise ValueError(f"--schemes {name}: unknown; choose from {', '.join(SCHEMES)}")
        scheme = SCHEMES[name]
        reason = _warm_up(scheme, config) if scheme.is_installed() else f"not installed (pip install {scheme.package})"
        if reason is None:
            chosen.append(scheme)
        else:
            skipped[name] = reason
    return chosen, skipped


def _warm_up(scheme: Scheme, config: Any) -> str | None:
    """Quantize, read and flush once: quanto compiles a C++ extension at its first read. Returns the error, if any."""
    find_ninja()
    states = random_states(config, 128, torch.float32, layers=1)
    try:
        cache = scheme.build(config, 512)
        for _ in range(3):
            append(cache, states)
    except (RuntimeError, OSError, ImportError) as error:
        return f"does not run here: {first_line(error)}"
    return None


def random_states(
    config: Any, tokens: int, dtype: torch.dtype, *, layers: int | None = None, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values per layer, [1, K, tokens, D]; keys with a mean and a spread per channel, as real ones have."""
    text = config.get_text_config(decoder=True)
    heads = text.num_key_value_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, head_dim, generator=generator)

    spread = normal(1).exp()
    return [
        ((normal(tokens) + normal(1)).mul(spread).to(dtype), normal(tokens).to(dtype))
        for _ in range(text.num_hidden_layers if layers is None else layers)
    ]


def append(cache: Cache, states: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Append the states of each layer, as the model's attention would."""
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)


def forward(model: Any, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Logits [B, V] after ``tokens`` [B, T], which the cache takes in."""
    argument = {cache_argument(model.forward): cache}
    return model(input_ids=tokens, use_cache=True, logits_to_keep=1, **argument).logits[:, -1]


def make_parser(
    name: str, summary: str, schemes: Iterable[str], known: Iterable[str] = tuple(SCHEMES)
) -> argparse.ArgumentParser:
    """The options that every benchmark has; ``schemes``: what runs by default, ``known``: what may be named."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=summary)
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument(
        "--schemes", nargs="+", choices=list(known), default=list(schemes), metavar="NAME", help=", ".join(known)
    )
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", metavar="PATH")
    return parser


def describe_run(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The head of every result file: what ran, where, with which versions."""
    return {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), **{p: package_version(p) for p in PACKAGES}},
        "settings": settings,
    }


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "load_average_at_start": load_average(),
    }


def load_average() -> tuple[float, float, float] | None:
    return os.getloadavg() if hasattr(os, "getloadavg") else None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def target(what: str, value: float, limit: str, reached: bool, quiet: bool = True) -> dict[str, Any]:
    """One line of the list of targets; not ``quiet``: other processes disturbed the measurement, it decides nothing."""
    verdict = ("PASS" if reached else "NOT REACHED") if quiet else "DISTURBED"
    return {"what": what, "value": value, "limit": limit, "verdict": verdict}


def target_lines(targets: list[dict[str, Any]]) -> list[str]:
    rows = [[t["what"], f"{t['value']:.4g}", t["limit"], t["verdict"]] for t in targets]
    return markdown_table(["target", "measured", "limit", ""], rows)


def head_lines(report: dict[str, Any]) -> list[str]:
    """Title, machine, versions and skipped schemes of a report, in Markdown."""
    machine, versions = report["machine"], report["versions"]
    lines = [
        f"# {report['benchmark']}",
        "",
        f"`{report['command']}` on {machine['cpu']}, {machine['cores']} cores, {report['date']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "",
    ]
    return lines + [f"- **{name}: {reason}**" for name, reason in report["skipped"].items()]


def markdown_table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["", *("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)), ""]


def write_report(report: dict[str, Any], markdown: list[str], path: Path) -> None:
    """JSON at ``path``, the same as Markdown beside it and on stdout."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    text = "\n".join(markdown).rstrip() + "\n"
    path.with_suffix(".md").write_text(text)
    print(text)

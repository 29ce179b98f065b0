"""The demo behind ``hf-kvquant demo``: a fact hidden in real text, asked for with DynamicCache and with each preset.

Decisions:
- Two phases. The text is read into the cache first, then the question is asked against what the cache stored. In one
  prefill the question would attend to keys and values before they are quantized, and every scheme would look perfect.
- Bytes are taken when every scheme holds the same number of tokens: an end-of-text token does not stop a run early.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import Cache, DynamicCache, StoppingCriteria, StoppingCriteriaList

from hf_kvquant._compat import cache_argument
from hf_kvquant.attach import attach
from hf_kvquant.cache import QuantizedKVCache
from hf_kvquant.models import load_model, quiet, smollm2_dir
from hf_kvquant.presets import PRESETS
from hf_kvquant.prompt import DemoError, Prompt, build_prompt, check, data_path
from hf_kvquant.spec import first_line

__all__ = [
    "DemoError",
    "DemoSettings",
    "Row",
    "build_prompt",
    "data_path",
    "format_table",
    "load_model",
    "run",
    "smollm2_dir",
]

FULL_PRECISION = "DynamicCache"
DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
MIN_TOKENS = 400  # below, the exact window and the sinks hold most of the text and there is little to see
MIN_NEW_TOKENS = 10  # the code alone takes up to eight


@dataclass(frozen=True)
class DemoSettings:
    """What to run; ``model`` None is SmolLM2-135M-Instruct, ``presets`` are names in ``PRESETS``."""

    model: str | None = None
    tokens: int = 1500
    presets: tuple[str, ...] = ("fp8", "int8", "k4v4", "k4v2", "k2v2", "cr4", "cm3", "cm2")
    dtype: str = "bfloat16"
    new_tokens: int = 16
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        check(bool(self.presets), f"--presets: none named; choose from {', '.join(PRESETS)}")
        for preset in self.presets:
            check(preset in PRESETS, f"--presets {preset}: unknown; choose from {', '.join(PRESETS)}")
        check(self.dtype in DTYPES, f"--dtype {self.dtype}: unknown; choose from {', '.join(DTYPES)}")
        check(self.tokens >= MIN_TOKENS, f"--tokens {self.tokens}: too few; at least {MIN_TOKENS}")
        check(self.new_tokens >= MIN_NEW_TOKENS, f"--new-tokens {self.new_tokens}: too few; at least {MIN_NEW_TOKENS}")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    scheme: str
    answer: str
    right: bool
    nbytes: int
    bits_per_element: float
    ratio: float
    seconds_per_token: float


def run(settings: DemoSettings) -> tuple[Prompt, list[Row]]:
    """The prompt and one row per scheme, DynamicCache first; a progress bar on stderr while it works."""
    with quiet(), tqdm(desc="loading the model", unit="token", disable=None, leave=False) as bar:
        model, tokenizer = _load(settings)
        _check_length(model, settings)
        prompt = build_prompt(tokenizer, settings.tokens, settings.seed)
        bar.reset(total=(1 + len(settings.presets)) * (len(prompt) + settings.new_tokens))
        rows: list[Row] = []
        for scheme in (FULL_PRECISION, *settings.presets):
            row = _measure(model, tokenizer, prompt, scheme, settings.new_tokens, bar)
            rows.append(replace(row, ratio=row.nbytes / (rows[0] if rows else row).nbytes))
    return prompt, rows


def format_table(rows: list[Row]) -> str:
    """Plain text, columns aligned."""
    head = ("cache", "answer", "", "cache bytes", "bits/element", "ratio", "s/token")
    body = [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    left = (0, 1, 2)
    return "\n".join(
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in (head, tuple("-" * w for w in widths), *body)
    )


def _cells(row: Row) -> tuple[str, ...]:
    mark = "right" if row.right else "wrong"
    numbers = (f"{row.nbytes:,}", f"{row.bits_per_element:.2f}", f"{row.ratio:.3f}", f"{row.seconds_per_token:.3f}")
    return (row.scheme, row.answer, mark, *numbers)


def _load(settings: DemoSettings) -> tuple[Any, Any]:
    try:
        torch.empty(0, device=settings.device)
    except (RuntimeError, AssertionError) as error:
        raise DemoError(f"--device {settings.device}: {first_line(error)}; choose another, such as cpu") from error
    try:
        model, tokenizer = load_model(settings.model, DTYPES[settings.dtype])
    except (OSError, ValueError) as error:
        if settings.model is None:
            raise
        raise DemoError(
            f"--model {settings.model}: neither a model folder nor a hub id that loads ({first_line(error)})"
        ) from error
    return model.to(settings.device), tokenizer


def _check_length(model: Any, settings: DemoSettings) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and settings.tokens + settings.new_tokens > limit:
        raise DemoError(
            f"--tokens {settings.tokens}: the model ends at {limit} positions; with --new-tokens {settings.new_tokens} "
            f"choose at most {limit - settings.new_tokens}"
        )


def _measure(model: Any, tokenizer: Any, prompt: Prompt, scheme: str, new_tokens: int, bar: tqdm) -> Row:
    cache = DynamicCache(config=model.config) if scheme == FULL_PRECISION else QuantizedKVCache(model.config, scheme)
    needs_attach = isinstance(cache, QuantizedKVCache) and cache.quantization.needs_attach
    with attach(model) if needs_attach else contextlib.nullcontext():
        text, seconds = _ask(model, tokenizer, prompt, cache, new_tokens, bar, scheme)
    nbytes, bits = _size(cache)
    return Row(scheme, _first_sentence(text), prompt.answer in text, nbytes, bits, 1.0, seconds)


def _first_sentence(text: str) -> str:
    """The first sentence of an answer, fit for a table cell."""
    line = (text.strip().splitlines() or [""])[0].split(". ")[0][:24]
    return "".join(c if c.isprintable() else "?" for c in line)


class _Clock(StoppingCriteria):
    """Stops nothing: notes when each token is there and moves the bar."""

    def __init__(self, bar: tqdm) -> None:
        self.bar = bar
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        self.bar.update(1)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def _ask(
    model: Any, tokenizer: Any, prompt: Prompt, cache: Cache, new_tokens: int, bar: tqdm, scheme: str
) -> tuple[str, float]:
    ids = torch.tensor([prompt.haystack + prompt.question], device=model.device)
    bar.set_description(f"{scheme}: reading")
    haystack = ids[:, : len(prompt.haystack)]
    model.base_model(haystack, use_cache=True, **{cache_argument(model.base_model.forward): cache})
    bar.update(haystack.shape[1])
    bar.set_description(f"{scheme}: answering")
    clock = _Clock(bar)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        stopping_criteria=StoppingCriteriaList([clock]),
        **{cache_argument(model.forward): cache},
    )
    bar.update(len(prompt.question))
    steps = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), statistics.median(steps)


def _size(cache: Any) -> tuple[int, float]:
    """Bytes and bits per element of everything the cache holds."""
    if isinstance(cache, QuantizedKVCache):
        report = cache.memory_report()
        return report.total, report.bits_per_element
    tensors = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, torch.Tensor)]
    nbytes = sum(t.nbytes for t in tensors)
    return nbytes, 8 * nbytes / sum(t.numel() for t in tensors)

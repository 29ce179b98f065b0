"""Census of architectures: what the cache does on every causal-LM model type, found by running a tiny model of each.

Decision: each type is built with random weights (``tiny_configs``) and run twice on a left-padded batch of 2, a prompt
of 12 tokens and 40 single steps: with DynamicCache and, attached, with a lossless cache that closes blocks of 8 tokens
and stores keys before RoPE. The largest difference of the logits decides. One further step with a cache that was
spoilt on purpose must change them: it shows that the comparison can fail. Whatever a type raises, in building or in
running, becomes its record. Rejected: a process per type; none of the 196 types of transformers 5.24 ends one.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import inspect
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from hf_kvquant._compat import cache_argument
from hf_kvquant.attach import attach
from hf_kvquant.cache import QuantizedKVCache
from hf_kvquant.config import KVQuantConfig
from hf_kvquant.layers import QuantizedLayer
from hf_kvquant.rotary import NO_ROPE
from hf_kvquant.spec import TensorSpec
from hf_kvquant.tiny_configs import tiny_config

TOLERANCE = 2e-5
VERDICTS = {
    "pre-RoPE": "keys stored before RoPE in at least one layer, logits equal",
    "post-RoPE": "quantized, but its rotation was not recognised: keys stored as rotated, logits equal",
    "no RoPE": "quantized layers do not rotate their keys, logits equal",
    "native": "no layer of plain full attention: transformers' own layers throughout, logits equal",
    "not supported": "cannot be used with this cache, or not compared",
    "not built": "no tiny model of it could be built here",
}
PASSING = ("pre-RoPE", "post-RoPE", "no RoPE", "native")
EXACT = TensorSpec("none", group_size=8)
LOSSLESS = KVQuantConfig(EXACT, EXACT, residual_length=4, sink_length=2, pre_rope=True)
IDS = torch.randint(3, 97, (2, 53), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[1, :5] = 0
POSITIONS = (MASK.cumsum(1) - 1).clamp_min(0)
STEPS = [(0, 12), *((t, t + 1) for t in range(12, 52))]
SPOILT_STEP = (52, 53)
# A spoilt cache must move the logits at least this far. Measured: 0.008 (bailing_hybrid) to 5.6.
BLIND_BELOW = 100 * TOLERANCE
FEWEST_BLOCKS = 4  # in each row of each quantized layer; 47 to 52 tokens close 5
MOST_ERROR_TEXT = 160


class CensusError(ValueError):
    """A request that cannot be met: an unknown type, a file that cannot be written."""


@dataclass(frozen=True)
class Record:
    """What was found about one type.

    Attributes:
        verdict: one of ``VERDICTS``.
        reason: why it is not better than that.
        layers: how many layers are stored how.
        difference: largest difference of the logits to DynamicCache's.
        sensitivity: the same for the step with a spoilt cache.
    """

    model_type: str
    class_name: str
    verdict: str
    reason: str = ""
    layers: str = ""
    difference: float | None = None
    sensitivity: float | None = None

    @property
    def passes(self) -> bool:
        return self.verdict in PASSING


def choose_types(names: Iterable[str] = ()) -> tuple[str, ...]:
    """The named model types, or all of the installed transformers."""
    known = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    chosen = tuple(dict.fromkeys(names)) or known
    for name in chosen:
        if name not in known:
            close = ", ".join(difflib.get_close_matches(name, known)) or f"any of {len(known)}, such as {known[0]}"
            raise CensusError(f"--types {name}: not a causal-LM type of this transformers; close: {close}")
    return chosen


def check(model_type: str) -> Record:
    """Build a tiny model of the type and compare the caches on it; an exception of the type is a record too."""
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    with _undisturbed():
        try:
            model = build(model_type)
        except Exception as error:  # foreign code: whatever it raises is the finding
            return Record(model_type, class_name, "not built", _text(error))
        return Record(model_type, class_name, *_findings(model))


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Silence, the caller's random numbers, and one thread. Measured for six types on 2 cores: 2.2 s, with two threads
    3.5 s."""
    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        torch.set_num_threads(threads)
        gc.collect()


def build(model_type: str) -> Any:
    """A tiny model of ``model_type`` with random weights, of the class that AutoModelForCausalLM chooses."""
    config = tiny_config(model_type)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    parts = (getattr(config, name) for name in config.sub_configs)
    if not isinstance(config, model_class.config_class):
        config = next((part for part in parts if isinstance(part, model_class.config_class)), config)
    torch.manual_seed(0)
    model = model_class._from_config(config).eval().float()
    _vary_constants(model)
    return model


@torch.no_grad()
def _vary_constants(model: torch.nn.Module) -> None:
    """Norms of ones and biases of zeros hide things: a norm of ones after RoPE commutes with it, a trained one does not
    (hunyuan_v1_dense)."""
    for parameter in model.parameters():
        if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
            parameter.add_(torch.rand_like(parameter) - 0.5)


def _findings(model: Any) -> tuple[Any, ...]:
    """The fields of a record, from the verdict on, for a model that was built."""
    if not _takes_cache(model):
        return "not supported", "its forward takes no transformers Cache"
    try:
        native = DynamicCache(config=model.config)
        expected, next_expected = _logits(model, native), _forward(model, native, *SPOILT_STEP)
    except Exception as error:
        return "not supported", f"fails with DynamicCache as well: {_text(error)}"
    try:
        return _compared(model, expected, next_expected)
    except Exception as error:
        return "not supported", _text(error)


def _takes_cache(model: Any) -> bool:
    parameters = inspect.signature(model.forward).parameters
    parameter = parameters.get(cache_argument(model.forward))
    return parameter is not None and "dict" not in str(parameter.annotation)


def _compared(model: Any, expected: torch.Tensor, next_expected: torch.Tensor) -> tuple[Any, ...]:
    cache = QuantizedKVCache(model.config, LOSSLESS)
    with attach(model):
        difference = _distance(_logits(model, cache), expected)
        layers, (verdict, reason) = _layers_text(cache), _verdict(cache, model)
        closed = [len(row.blocks) for layer in _quantized(cache) for row in layer.rows]
        _spoil(cache)
        sensitivity = _distance(_forward(model, cache, *SPOILT_STEP), next_expected)
    if not difference <= TOLERANCE:
        verdict, reason = "not supported", f"the logits differ from DynamicCache's by {difference:.2g}"
    elif min(closed, default=FEWEST_BLOCKS) < FEWEST_BLOCKS:
        verdict, reason = "not supported", f"not compared: a quantized layer closed only {min(closed)} blocks"
    elif not sensitivity >= BLIND_BELOW:
        verdict, reason = "not supported", f"not compared: a spoilt cache moves the logits by only {sensitivity:.2g}"
    return verdict, reason, layers, difference, sensitivity


def _forward(model: Any, cache: Cache, start: int, end: int) -> torch.Tensor:
    arguments = {"attention_mask": MASK[:, :end], "use_cache": True, cache_argument(model.forward): cache}
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = POSITIONS[:, start:end]
    with torch.no_grad():
        return model(input_ids=IDS[:, start:end], **arguments).logits[:, -1]


def _logits(model: Any, cache: Cache) -> torch.Tensor:
    return torch.stack([_forward(model, cache, *step) for step in STEPS])


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _spoil(cache: QuantizedKVCache) -> None:
    """Turn the closed keys the wrong way; where none is rotated, give each row the past of the other."""
    for table in cache.rotary.tables:
        table.sin.neg_()
    if not cache.rotary.tables:
        cache.reorder_cache(torch.tensor([1, 0]))


def _quantized(cache: QuantizedKVCache) -> list[QuantizedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, QuantizedLayer) and layer.is_initialized]


def _verdict(cache: QuantizedKVCache, model: Any) -> tuple[str, str]:
    """Verdict and reason, the logits being equal."""
    layers = _quantized(cache)
    unknown = [layer.rotary_reason for layer in layers if layer.rotary is None and layer.rotary_reason != NO_ROPE]
    if not layers:
        return "native", ""
    if any(layer.rotary is not None for layer in layers):
        return "pre-RoPE", "; ".join(dict.fromkeys(unknown))
    if unknown:
        return "post-RoPE", "; ".join(dict.fromkeys(unknown))
    rotates = any("rotary" in type(module).__name__.lower() for module in model.modules())
    return "no RoPE", "only layers that stay native rotate" if rotates else ""


def _layers_text(cache: QuantizedKVCache) -> str:
    counts = Counter(map(_layer_text, cache.layers))
    return "; ".join(f"{count} of {len(cache.layers)} {text}" for text, count in counts.items())


def _layer_text(layer: Any) -> str:
    if not isinstance(layer, QuantizedLayer):
        return f"native {type(layer).__name__}"
    if not layer.is_initialized:
        return "never updated"
    if layer.rotary is None:
        return "without rotation" if layer.rotary_reason == NO_ROPE else "after RoPE"
    layout = layer.rotary.layout
    return f"before RoPE, {layout.pairs} {layout.pairing} pairs of the {layout.slot}s"


def _text(error: Exception) -> str:
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= MOST_ERROR_TEXT else f"{text[:MOST_ERROR_TEXT]}..."

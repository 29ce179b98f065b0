"""Which code attends to packed codes: the registry, and the choice ``auto`` makes.

Decision: a backend is a function with the signature of :func:`hf_kvquant.attention.reference.decode`. ``auto`` takes
the one in C++ where there is a CPU with a C++ compiler, and says why where not; a backend asked for by name runs or
raises. ``compiled`` is the same algebra for torch.compile: slower, but made of torch's operations alone. ``full`` is
no backend but the absence of one: the model's own attention over full tensors, as without ``attach``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from hf_kvquant.attention import reference
from hf_kvquant.attention.compiled import CompiledDecode
from hf_kvquant.attention.compiler import CompilationError, compiler
from hf_kvquant.attention.native import NativeDecode
from hf_kvquant.attention.plan import Held, Plan, additive_masks, held_of, plan_of, tensors_of
from hf_kvquant.past import Past
from hf_kvquant.spec import check_choice

Backend = Callable[..., torch.Tensor]
_compiled, _native = CompiledDecode(), NativeDecode()
_masks: MutableMapping[torch.Tensor, dict[Hashable, Any]] = WeakIdKeyDictionary()


def native(
    query: torch.Tensor,
    past: Past,
    scaling: float,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    auxiliary: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``hf_kvquant.attention.reference.decode``, straight from the codes, one new token after the other, in C++; for
    what ``hf_kvquant.attention.plan.refusal`` does not refuse.

    ``query``, ``past``, ``scaling``, ``softcap``, ``mask`` and ``auxiliary`` are those of the reference, and so is what
    is returned.

    Raises:
        CompilationError: the compiler failed.
    """
    return _token_by_token(_native, query, past, scaling, softcap, mask, auxiliary)


def compiled(
    query: torch.Tensor,
    past: Past,
    scaling: float,
    softcap: float = 0.0,
    mask: torch.Tensor | None = None,
    auxiliary: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``native``, by torch.compile.

    ``query``, ``past``, ``scaling``, ``softcap``, ``mask`` and ``auxiliary`` are those of the reference, and so is what
    is returned.

    Raises:
        CompilationError: torch.compile failed, or is switched off.
    """
    return _token_by_token(_by_torch, query, past, scaling, softcap, mask, auxiliary)


def _token_by_token(
    run: Callable[..., torch.Tensor],
    query: torch.Tensor,
    past: Past,
    scaling: float,
    softcap: float,
    mask: torch.Tensor | None,
    auxiliary: torch.Tensor | None,
) -> torch.Tensor:
    count = query.shape[2]
    steps = []
    for index in range(count):
        visible, recent = _visible(mask, index, past, newer=count - 1 - index)
        plan = plan_of(past, query.shape[1], scaling, softcap, visible is not None, auxiliary is not None)
        own = tensors_of(past, plan, recent)
        own["query"] = (query if count == 1 else query[:, :, index : index + 1]).contiguous()
        if plan.masked:
            own["mask.blocks"], own["mask.exact"] = _shared_masks(past, mask, index, visible, recent)
        if auxiliary is not None:
            own["auxiliary"] = auxiliary
        steps.append(run(plan, held_of(past, plan), own))
    return steps[0] if count == 1 else torch.cat(steps, 1)


def _by_torch(plan: Plan, held: Held, own: dict[str, torch.Tensor]) -> torch.Tensor:
    return _compiled(plan, {"query": own["query"]} | held.tensors | own)


def _visible(mask: torch.Tensor | None, index: int, past: Past, newer: int) -> tuple[torch.Tensor | None, int]:
    """The mask ``[B or 1, T]`` of one new token, None where it hides nothing, and how many recent tokens there are to
    see: without those ``newer`` than itself, if they are hidden (asked on CPU only, where it is cheap)."""
    recent = past.length - past.window_start
    if mask is None:
        return None, recent - newer
    own = mask[:, 0, index]
    if own.device.type != "cpu":
        return own, recent
    hidden = ~own if own.dtype == torch.bool else own <= torch.finfo(own.dtype).min
    seen = past.length - newer
    if newer and bool(hidden[:, seen:].all()):
        own, hidden, recent = own[:, :seen], hidden[:, :seen], recent - newer
    plain = not hidden.any() if own.dtype == torch.bool else not own.any()
    return (None if plain else own), recent


def _shared_masks(
    past: Past, mask: torch.Tensor | None, index: int, own: torch.Tensor | None, recent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`additive_masks` of the new token ``index``, made once for all layers of a forward: they are handed the
    same ``mask`` and hold their tokens alike (0.3 ms a layer for 4 rows of 8,000 tokens)."""
    if mask is None or mask.is_inference():  # the latter do not tell whether they were written to
        return additive_masks(past, own, recent)
    known = _masks.setdefault(mask, {})
    key = index, recent, past.window_start, past.block_length, past.states[0].sinks is None, mask._version
    rows, made = known.get(key, (None, None))
    if made is None or rows != past.rows:
        made = additive_masks(past, own, recent)
        known[key] = past.rows, made
    return made


def automatic(*call: Any) -> torch.Tensor:
    """``native``, or the reference where compiling fails, which a warning says once; ``call`` are its arguments."""
    try:
        return native(*call)
    except CompilationError as error:
        warnings.warn(f"{error}. Until then decode steps read full tensors, slowly", stacklevel=2)
        return reference.decode(*call)


BACKENDS: dict[str, Backend] = {
    "native": native,
    "compiled": compiled,
    "reference": reference.decode,
    "auto": automatic,
}
"""Name -> function with the signature of the reference: what ``attach(model, backend=name)`` takes, beside "full"."""


@dataclass(frozen=True)
class Choice:
    """Which code decode steps run, and why.

    Attributes:
        name: a key of ``BACKENDS``, or "full": the model's own attention over full tensors.
        reason: why it was chosen.
    """

    name: str
    reason: str


def choose(requested: str, device: torch.device) -> Choice:
    """The backend for a model on ``device``.

    Args:
        requested: "auto", "full", or a name in ``BACKENDS``.
        device: of the model.

    Raises:
        ValueError: unknown name.
        RuntimeError: the backend asked for cannot run here.
    """
    check_choice("backend", requested, ("full", *BACKENDS))
    has_compiler = device.type != "cpu" or bool(compiler())
    if requested == "native" and device.type != "cpu":
        raise RuntimeError(
            f"backend='native' is not valid: it is C++ for CPUs, and the model is on {device.type}; choose 'auto'"
        )
    if requested in ("native", "compiled") and not has_compiler:
        raise RuntimeError(
            f"backend={requested!r} is not valid: no C++ compiler was found (g++ or clang++ on the path, or CXX); "
            "install one, or choose 'auto'"
        )
    if requested != "auto":
        return Choice(requested, "asked for")
    if device.type != "cpu":
        return Choice("full", f"decode attention over codes is for CPUs only, the model is on {device.type}")
    if not has_compiler:
        return Choice("full", "no C++ compiler was found (g++ or clang++ on the path, or CXX)")
    return Choice("native", f"CPU with a C++ compiler ({compiler()})")

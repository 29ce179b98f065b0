"""The step of :mod:`hf_kvquant.attention.decode`, compiled by torch.compile, one function per plan.

Decision: ``fullgraph`` and dynamic in batch, blocks and recent tokens; heads, head dimensions and the layout of a block
are pinned, which lets inductor vectorize without remainder loops. Each plan gets a code object of its own, so that
formats do not count against each other's recompilation limit. Contraction of multiply and add is allowed, which
inductor forbids by default: 1.4 times as fast, and it rounds once instead of twice.

Compiling takes seconds per plan the first time on a machine; inductor keeps the result on disk
(``TORCHINDUCTOR_CACHE_DIR``), and the next process loads it.
"""

from __future__ import annotations

import re
import threading
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental import _config as shape_config

from hf_kvquant.attention.compiler import CompilationError, failure_of, notice
from hf_kvquant.attention.decode import decode
from hf_kvquant.attention.plan import Plan
from hf_kvquant.transforms import Hadamard

_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",
    "size_asserts": False,
    "alignment_asserts": False,
    # Inductor writes what is read often, or sums many terms, to memory first: here that would be the dequantized past.
    # What has to be written says so (codes.written).
    "realize_reads_threshold": 10_000,
    "realize_opcount_threshold": 10_000,
    "realize_acc_reads_threshold": 10_000,
}
# Dimensions that a plan fixes, by what a tensor is; batch, blocks and recent tokens stay dynamic.
_PINNED = {
    "query": (1, 2, 3),
    "recent": (1, 3),
    "sinks": (1, 2, 3),
    "scale": (3, 4),
    "zero": (3, 4),
    "mean": (1, 2),
    "deviation": (1, 2),
    "order": (1, 2),
    "cos": (2, 3),
    "sin": (2, 3),
    "auxiliary": (0,),
    "planes": (1, 3, 4),
}
# Tensors that are contiguous at every step; the others are views of storage with room behind their blocks or tokens.
_CONTIGUOUS = frozenset(("query", "sinks", "mean", "deviation", "order", "auxiliary", "blocks", "exact"))


class CompiledDecode:
    """Compiled steps by plan, dtypes of tensors, device and threads, and which of their sizes are 1 (torch compiles for
    that apart). The plan determines which tensors there are."""

    def __init__(self) -> None:
        self._steps: dict[Hashable, _Step | CompilationError] = {}
        self._lock = threading.Lock()

    def __call__(self, plan: Plan, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """``[B, 1, H, Dv]``; see :func:`hf_kvquant.attention.decode.decode`."""
        given = list(tensors.values())
        # Inductor writes the number of threads into the code.
        place = given[0].device, torch.get_num_threads()
        key = plan, tuple(tensor.dtype for tensor in given), place, _single(tensors)
        step = self._steps.get(key)
        if step is None:
            with self._lock:
                step = self._steps.get(key)
                if step is None:
                    step = self._steps[key] = self._new(plan, tensors)
        if isinstance(step, CompilationError):  # known from the first attempt, which takes seconds
            raise step
        return step(given)

    @staticmethod
    def _new(plan: Plan, tensors: dict[str, torch.Tensor]) -> _Step | CompilationError:
        try:
            with notice(f"({plan.key.format} keys, {plan.value.format} values)"):
                return _compiled(plan, tensors)
        except Exception as error:  # whatever compilers raise
            return failure_of(error)


class _Step:
    """A compiled graph that is called without torch's guards: what they would ask is in the key of the step or true of
    every call by construction (:func:`_examples`). They take 0.05 to 0.2 ms of a call, 30 calls a step."""

    def __init__(self, graph: torch.fx.GraphModule, run: Callable[..., Any]):
        self._run = run
        inputs = [node.meta["grapharg"] for node in graph.graph.find_nodes(op="placeholder")]
        tensors = {each.source.name: each.example for each in inputs if isinstance(each.example, torch.Tensor)}
        self._sources = [_source_of(each.source.name, tensors) for each in inputs]

    def __call__(self, given: list[torch.Tensor]) -> torch.Tensor:
        return self._run(*[source(given) for source in self._sources])[0]


def _source_of(name: str, tensors: dict[str, torch.Tensor]) -> Callable[[list[torch.Tensor]], Any]:
    """How an input of the graph is got from the tensors of a call: one of them, a size or stride of one, or a constant
    (the Hadamard matrix), which is in ``tensors`` under its name."""
    found = re.fullmatch(r"(.*?)(?:\.(size|stride)\(\)\[(\d+)\])?", name)
    assert found is not None
    base, kind, dim = found[1], found[2], int(found[3] or 0)
    given = re.fullmatch(r"L\['given'\]\[(\d+)\]", base)
    if given is None:
        constant = tensors[base] if kind is None else getattr(tensors[base], kind)(dim)
        return lambda _: constant
    index = int(given[1])
    if kind is None:
        return lambda given: given[index]
    return (lambda given: given[index].size(dim)) if kind == "size" else (lambda given: given[index].stride(dim))


def _single(tensors: dict[str, torch.Tensor]) -> tuple[bool, ...]:
    """Whether batch, blocks, recent tokens and rows of the rotary tables are one."""
    sizes = [tensors["query"].shape[0], tensors["key.planes.0"].shape[2], tensors["key.recent"].shape[2]]
    sizes += [tensors["cos"].shape[0]] if "cos" in tensors else []
    return tuple(size == 1 for size in sizes)


def _examples(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the views to compile with, whose strides stand in no simple relation to their sizes: torch would take
    one for a rule."""
    return [
        tensor if _kind(name) in _CONTIGUOUS else _roomy(tensor, 1 if name in ("cos", "sin") else 2)
        for name, tensor in tensors.items()
    ]


def _roomy(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    size = tensor.shape[dim]
    room = tensor.new_zeros(*tensor.shape[:dim], size + 3, *tensor.shape[dim + 1 :])
    return room.narrow(dim, 0, size).copy_(tensor)


def _compiled(plan: Plan, tensors: dict[str, torch.Tensor]) -> _Step:
    names = tuple(tensors)
    if plan.key.rotation or plan.value.rotation:  # constants are made outside the graph, or they are made in each step
        for size in plan.head_dims:
            Hadamard().fold_query(torch.zeros(size, device=tensors["query"].device))
    pinned = tuple((name, dim, tensor.shape[dim]) for name, tensor in tensors.items() for dim in _pinned(name))

    def step(*given: torch.Tensor) -> torch.Tensor:
        found = dict(zip(names, given, strict=True))
        for name, dim, size in pinned:
            torch._check(found[name].shape[dim] == size)
        return decode(plan, found)

    steps: list[_Step] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        run: Any = compile_fx(graph, examples, config_patches=_OPTIONS)
        steps.append(_Step(graph, run))
        return run

    own = types.FunctionType(step.__code__.replace(), globals(), "step", None, step.__closure__)
    # Numbers of the plan are constants (torch would make them inputs), and sizes that happen to be equal are not tied.
    constants = dynamo_config.patch(specialize_int=True, specialize_float=True)
    distinct = shape_config.patch(use_duck_shape=False)  # pyright: ignore[reportAttributeAccessIssue]
    with constants, distinct, torch.no_grad():
        torch.compile(own, backend=backend, fullgraph=True, dynamic=True)(*_examples(tensors))
    if not steps:
        raise RuntimeError("torch.compile is switched off (TORCHDYNAMO_DISABLE or torch.compiler.set_stance)")
    return steps[0]


def _pinned(name: str) -> tuple[int, ...]:
    return _PINNED.get(_kind(name), ())


def _kind(name: str) -> str:
    """What a tensor is: "key.planes.0" -> "planes", "mask.exact" -> "exact"."""
    parts = name.split(".")
    return "planes" if "planes" in parts else parts[-1]

"""The step of :mod:`hf_kvquant.attention.decode` in C++ (``cpp/decode.cpp``), for CPUs.

Decision: one call per layer and step, which gets pointers and strides and allocates nothing that grows with the past.
The same algebra compiled by inductor (:mod:`hf_kvquant.attention.compiled`) takes 1.5 times as long at 16,384 tokens,
in bf16 twice (``benchmarks/results/attention.md``): it keeps no tile of sums in registers, has no products of bytes,
and its memory grows with the past.
The source is compiled once per machine by inductor's own ``CppCodeCache``: its compiler, its flags, its lock, its
folder (``TORCHINDUCTOR_CACHE_DIR``); it is loaded by ctypes and includes nothing of torch.

Rejected: an extension in the wheel, which would have to be built for every platform and instruction set.
"""

from __future__ import annotations

import ctypes
import functools
import re
from array import array
from pathlib import Path
from typing import Any

import torch
from torch._inductor.codecache import CppCodeCache

from hf_kvquant.attention.codes import offset_of
from hf_kvquant.attention.compiler import CompilationError, failure_of, notice
from hf_kvquant.attention.plan import Held, Plan
from hf_kvquant.planes import Plane, planes_of
from hf_kvquant.scales import SCALE_FORMATS
from hf_kvquant.spec import TensorSpec
from hf_kvquant.transforms import Hadamard

SOURCES = Path(__file__).with_name("cpp")
# Inductor forbids contraction of multiply and add, which rounds once instead of twice and halves the operations.
# Elimination of partial redundancies has GCC 12 copy the sums of the integer tiles from register to register in each
# turn of their loops (times 1.3 to 2.1).
_FLAGS = ("-ffp-contract=fast", "-ftree-loop-vectorize", "-fno-tree-pre")
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MANTISSAS: dict[torch.dtype | None, int] = {torch.float8_e5m2: 2, torch.float8_e4m3fn: 3}
_STATIC, _TABLE, _HALF, _SINGLE = range(4)
_ZEROS = {None: 0, "fp16": 1, "fp32": 2, "int8": 3}
_MAX_PLANES, _MAX_SEGMENTS = 4, 64
# Fewer codes than this per thread are not worth waking it for.
_CODES_PER_THREAD = 1 << 17
# Runs of blocks that threads share, so that none waits long for the last one.
_TASKS_PER_THREAD = 3
_SIDE = ("scale", "zero", "exponent", "zero_exponent", "zero_range", "mean", "deviation", "order", "sinks", "recent")

Int, Double = ctypes.c_int64, ctypes.c_double
_Call = array


class _Segment(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("start", "stop")),
        *((name, Double) for name in ("step", "offset")),
        *((name, Int) for name in ("low", "place", "high", "high_place")),
    ]


class _Spec(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("element", "lossless", "float8_mantissa", "tokens_per_group", "channels_per_group")),
        *((name, Int) for name in ("groups", "scale_kind", "zero_kind", "planes")),
        ("widths", Int * _MAX_PLANES),
        ("channels", Int * _MAX_PLANES),
        ("segments", Int),
        ("scales", Int),
        ("static_scales", Int),
        ("segment", _Segment * _MAX_SEGMENTS),
    ]


class _Form(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("heads", "repeats", "key_dim", "value_dim", "block_length", "angle")),
        *((name, Int) for name in ("turns_centre", "stores_raw", "pairs")),
        *((name, Double) for name in ("sign", "scaling", "softcap")),
        *((name, Int) for name in ("first", "second", "rest", "rests", "fold_key", "fold_value")),
        ("key", _Spec),
        ("value", _Spec),
    ]


@functools.cache
def _library(*flags: str) -> ctypes.CDLL | CompilationError:
    """The compiled source, or how compiling failed: known from the first attempt, which takes seconds. Tests compile
    with ``-DWITHOUT_INTEGERS`` what machines without integer products of bytes run."""
    try:
        with notice("for this machine"):
            sizes = f"-DFORM_SIZE={ctypes.sizeof(_Form)}", f"-DCALL_SIZE={ctypes.sizeof(Int) * _CALL_LENGTH}"
            library = CppCodeCache.load(_joined("decode.cpp", set()), extra_flags=(*_FLAGS, *flags, *sizes))
    except Exception as error:  # whatever compilers raise
        return failure_of(error)
    library.hf_kvquant_decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.hf_kvquant_decode.restype = None
    return library


def _joined(name: str, seen: set[str]) -> str:
    """A source with the headers it includes in their place, each once: inductor caches by the text it is given."""
    seen.add(name)
    lines = []
    for line in (SOURCES / name).read_text("utf-8").splitlines(keepends=True):
        own = re.match(r'#include "(.*)"', line)
        if own is None:
            lines.append("" if line.startswith("#pragma once") else line)
        elif own[1] not in seen:
            lines.append(_joined(own[1], seen))
    return "".join(lines)


class NativeDecode:
    """Steps by plan and dtypes."""

    def __init__(self) -> None:
        self._steps: dict[Any, _Step] = {}

    def __call__(self, plan: Plan, held: Held, own: dict[str, torch.Tensor]) -> torch.Tensor:
        """``[B, 1, H, Dv]``; see :func:`hf_kvquant.attention.decode.decode`.

        Args:
            plan: what kind of step.
            held: what the layer holds.
            own: what this step brings: query, window, masks.

        Raises:
            CompilationError: the source cannot be compiled here.
        """
        if held.call is None:
            angles = held.tensors.get("cos", own.get("cos"))
            recent = own["key.recent"].dtype, own["value.recent"].dtype
            key = plan, *recent, None if angles is None else angles.dtype
            step = self._steps.get(key)
            if step is None:
                step = self._steps[key] = _Step(plan, held.tensors | own)
            narrow = {name: _narrow(tensor) for name, tensor in held.tensors.items()}
            held.call = step, step.prepared(narrow), narrow
        step, call, _ = held.call
        return step(call[:], own)


class _Step:
    """What a plan fixes, as the C++ code reads it, and where in a call each tensor goes."""

    def __init__(self, plan: Plan, tensors: dict[str, torch.Tensor]):
        library = _library()
        if isinstance(library, CompilationError):
            raise library
        self._run = library.hf_kvquant_decode
        self._plan = plan
        self._kept: list[Any] = []  # what pointers of the form point to
        self._form = self._new_form(tensors)
        self._shared = "cos" in tensors  # heads that read the same angles stay together
        codes = plan.heads * plan.block_length * sum(plan.head_dims)
        self._blocks_per_thread = -(-_CODES_PER_THREAD // codes)

    def prepared(self, held: dict[str, torch.Tensor]) -> _Call:
        """A call with what the layer holds in it."""
        call = _Call("q", bytes(8 * _CALL_LENGTH))
        for name, tensor in held.items():
            _put(call, name, tensor)
        call[_BLOCKS] = held["key.planes.0"].shape[2]
        call[_SINKS] = held["key.sinks"].shape[2] if self._plan.sinks else 0
        return call

    def __call__(self, call: _Call, own: dict[str, torch.Tensor]) -> torch.Tensor:
        """Attend; ``call`` as ``prepared``, which is written to."""
        plan, given = self._plan, own["query"]
        query = given.float()
        batch, heads = query.shape[:2]
        output = query.new_empty(batch, 1, heads, plan.head_dims[1])
        brought = [(name, _narrow(own[name])) for name in _BROUGHT if name in own]
        for name, tensor in brought:
            _put(call, name, tensor)
        call[_BATCH], call[_RECENT] = batch, own["key.recent"].shape[2]
        call[_THREADS], call[_SPLITS] = self._split(batch, call[_BLOCKS])
        call[_LIMBS] = 2 if given.dtype == torch.bfloat16 else 3
        call[_QUERY], call[_OUTPUT] = query.data_ptr(), output.data_ptr()
        if plan.masked:
            call[_BLOCK_MASK], call[_EXACT_MASK] = own["mask.blocks"].data_ptr(), own["mask.exact"].data_ptr()
        learned = own["auxiliary"].float().contiguous() if plan.auxiliary else None
        if learned is not None:
            call[_AUXILIARY] = learned.data_ptr()
        self._run(ctypes.addressof(self._form), call.buffer_info()[0])
        return output.to(given.dtype)

    def _split(self, batch: int, blocks: int) -> tuple[int, int]:
        """Threads, and runs of blocks per KV head."""
        threads = max(1, min(torch.get_num_threads(), batch * blocks // self._blocks_per_thread))
        runs = batch * (1 if self._shared else self._plan.heads)
        wanted = 1 if threads == 1 else -(-_TASKS_PER_THREAD * threads // runs)
        return threads, max(1, min(blocks, wanted))

    def _new_form(self, tensors: dict[str, torch.Tensor]) -> _Form:
        plan = self._plan
        form = _Form(
            heads=plan.heads,
            repeats=plan.repeats,
            key_dim=plan.head_dims[0],
            value_dim=plan.head_dims[1],
            block_length=plan.block_length,
            turns_centre=plan.turns_centre,
            stores_raw=plan.stores_raw,
            scaling=plan.scaling,
            softcap=plan.softcap,
            key=self._new_spec(plan.key, plan.head_dims[0], tensors["key.recent"]),
            value=self._new_spec(plan.value, plan.head_dims[1], tensors["value.recent"]),
        )
        if "cos" in tensors:
            assert plan.layout is not None
            channels = torch.arange(plan.head_dims[0])
            form.angle, form.sign, form.pairs = (
                _ELEMENTS.get(tensors["cos"].dtype, 0),
                plan.layout.sign,
                plan.layout.pairs,
            )
            form.first, form.second = (self._address(part) for part in plan.layout.parts(channels))
            rest = plan.layout.rest(channels)
            form.rest, form.rests = self._address(rest), len(rest)
        if plan.key.rotation:
            form.fold_key = self._address(Hadamard().fold_query(torch.eye(plan.head_dims[0])))
        if plan.value.rotation:
            form.fold_value = self._address(Hadamard().fold_output(torch.eye(plan.head_dims[1])))
        return form

    def _new_spec(self, spec: TensorSpec, head_dim: int, recent: torch.Tensor) -> _Spec:
        fmt, element = spec.number_format, _ELEMENTS.get(recent.dtype, 0)
        if fmt.lossless:
            return _Spec(element=element, lossless=1, tokens_per_group=1, channels_per_group=1, groups=1)
        layout, segments = planes_of(spec, head_dim), spec.segments(head_dim)
        per_group = spec.channels_per_group(head_dim)
        form = _Spec(
            element=element,
            float8_mantissa=_MANTISSAS.get(fmt.dtype, 0),
            tokens_per_group=spec.tokens_per_group,
            channels_per_group=per_group,
            groups=head_dim // per_group,
            zero_kind=_ZEROS[spec.zero_format],
            planes=len(layout),
            segments=len(segments),
        )
        self._set_scales(form, spec)
        for index, plane in enumerate(layout):
            form.widths[index], form.channels[index] = plane.width, plane.channels
        for index, (each, start, stop) in enumerate(segments):
            middle = 0 if each.kind == "table" else 2 ** (each.bits - 1)
            offset = offset_of(each, spec) - middle * each.step
            form.segment[index] = _Segment(start, stop, each.step, offset, *_places(layout, start))
        return form

    def _set_scales(self, form: _Spec, spec: TensorSpec) -> None:
        stored = SCALE_FORMATS[spec.scale_format]
        if stored.dtype is None:
            form.scale_kind, form.static_scales = _STATIC, len(spec.static_scales)
            form.scales = self._address(torch.tensor(spec.static_scales))
        elif stored.dtype.itemsize == 1:
            form.scale_kind = _TABLE
            form.scales = self._address(stored.decode(torch.arange(256).to(torch.uint8).view(stored.dtype)))
        else:
            form.scale_kind = _HALF if stored.dtype == torch.float16 else _SINGLE

    def _address(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()


def _places(layout: tuple[Plane, ...], start: int) -> tuple[int, int, int, int]:
    """Plane and place in it of the low bits of the channels from ``start`` on, and of the high bits; -1 where all bits
    lie in one plane."""
    held = enumerate(plane.parts for plane in layout)
    found = sorted((part.shift, index, part.place) for index, parts in held for part in parts if part.start == start)
    (_, low, place), (_, high, high_place) = (*found, (0, -1, -1))[:2]
    return low, place, high, high_place


# Where things are in a call: the fields of Call in cpp/handed.h, then four numbers for each tensor.
_HEADER = (
    *("batch", "blocks", "sinks", "recent", "splits", "threads", "limbs"),
    *("query", "block_mask", "exact_mask", "auxiliary", "output"),
)
_BATCH, _BLOCKS, _SINKS, _RECENT, _SPLITS, _THREADS, _LIMBS, _QUERY, *_REST = range(len(_HEADER))
_BLOCK_MASK, _EXACT_MASK, _AUXILIARY, _OUTPUT = _REST
_PARTS = (*(f"planes.{index}" for index in range(_MAX_PLANES)), *_SIDE)
_NAMES = (*(f"{side}.{part}" for side in ("key", "value") for part in _PARTS), "cos", "sin")
_PLACES = {name: len(_HEADER) + 4 * index for index, name in enumerate(_NAMES)}
_CALL_LENGTH = len(_HEADER) + 4 * len(_NAMES)
_BROUGHT = ("key.recent", "value.recent", "cos", "sin")


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """The C++ code knows 32 bits at most."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _put(call: _Call, name: str, tensor: torch.Tensor) -> None:
    """Pointer and strides in bytes. A size of 1 stands for all rows (rotary tables) or all heads (axis "tensor")."""
    place, size = _PLACES[name], tensor.element_size()
    shape, (row, head, block, *_) = tensor.shape, tensor.stride()
    call[place] = tensor.data_ptr()
    call[place + 1] = row * size if shape[0] > 1 else 0
    call[place + 2] = head * size if shape[1] > 1 else 0
    call[place + 3] = block * size

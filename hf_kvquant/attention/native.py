"""The step of :mod:`hf_kvquant.attention.decode` in C++ (``cpp/decode.cpp``), for CPUs.

Decision: one call per layer and step, which gets pointers and strides and allocates nothing that grows with the past.
The same algebra compiled by inductor (:mod:`hf_kvquant.attention.compiled`) takes 2 to 3 times as long
(``benchmarks/results/attention.md``): it converts into memory and back between its loops, it keeps no tile of sums in
registers, and its graph costs 0.1 to 0.2 ms per call in allocations and views. The source is compiled once per machine
by inductor's own ``CppCodeCache``: its compiler, its flags, its lock, its folder (``TORCHINDUCTOR_CACHE_DIR``); it is
loaded by ctypes and includes nothing of torch, so that takes seconds.

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
from hf_kvquant.attention.plan import Plan
from hf_kvquant.formats import NumberFormat
from hf_kvquant.planes import Plane, planes_of
from hf_kvquant.scales import SCALE_FORMATS
from hf_kvquant.spec import TensorSpec
from hf_kvquant.transforms import Hadamard

SOURCES = Path(__file__).with_name("cpp")
# Inductor forbids contraction of multiply and add; here it rounds once instead of twice, and is twice as fast.
_FLAGS = ("-ffp-contract=fast", "-ftree-loop-vectorize")
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


class _Part(ctypes.Structure):
    _fields_ = [(name, Int) for name in ("plane", "start", "stop", "place", "shift")]


class _Segment(ctypes.Structure):
    _fields_ = [("start", Int), ("stop", Int), ("step", Double), ("offset", Double)]


class _Spec(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("lossless", "float8_mantissa", "tokens_per_group", "channels_per_group", "groups")),
        *((name, Int) for name in ("scale_kind", "zero_kind", "planes")),
        ("widths", Int * _MAX_PLANES),
        ("channels", Int * _MAX_PLANES),
        ("parts", Int),
        ("segments", Int),
        ("scales", Int),
        ("static_scales", Int),
        ("part", _Part * (2 * _MAX_SEGMENTS)),
        ("segment", _Segment * _MAX_SEGMENTS),
    ]


class _Form(ctypes.Structure):
    _fields_ = [
        *((name, Int) for name in ("heads", "repeats", "key_dim", "value_dim", "block_length", "element", "angle")),
        *((name, Int) for name in ("turns_centre", "stores_raw", "pairs")),
        *((name, Double) for name in ("sign", "scaling", "softcap")),
        *((name, Int) for name in ("first", "second", "rest", "rests", "fold_key", "fold_value")),
        ("key", _Spec),
        ("value", _Spec),
    ]


@functools.cache
def _library() -> ctypes.CDLL | CompilationError:
    """The compiled source, or how compiling failed: known from the first attempt, which takes seconds."""
    try:
        with notice("for this machine"):
            library = CppCodeCache.load(_joined("decode.cpp", set()), extra_flags=_FLAGS)
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
    """Steps by plan and dtypes; ``__call__`` as that of :class:`hf_kvquant.attention.compiled.CompiledDecode`."""

    def __init__(self) -> None:
        self._forms: dict[Any, _Step] = {}

    def __call__(self, plan: Plan, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """``[B, 1, H, Dv]``; see :func:`hf_kvquant.attention.decode.decode`.

        Raises:
            CompilationError: the source cannot be compiled here.
        """
        key = plan, tensors["key.recent"].dtype, tensors["cos"].dtype if "cos" in tensors else None
        step = self._forms.get(key)
        if step is None:
            step = self._forms[key] = _Step(plan, tensors)
        return step(tensors)


class _Step:
    """What a plan fixes, as the C++ code reads it, and where in a call each tensor goes."""

    def __init__(self, plan: Plan, tensors: dict[str, torch.Tensor]):
        self._plan = plan
        library = _library()
        if isinstance(library, CompilationError):
            raise library
        self._run = library.hf_kvquant_decode
        self._kept: list[Any] = []  # what pointers of the form point to
        self._form = self._new_form(tensors)
        self._wide = [name for name, tensor in tensors.items() if tensor.dtype == torch.float64 and name != "query"]
        self._slots = [
            (index, name, min(tensors[name].element_size(), 4)) for index, name in _slots() if name in tensors
        ]
        self._shared = "cos" in tensors  # heads that read the same angles stay together
        codes = plan.heads * plan.block_length * sum(plan.head_dims)
        self._blocks_per_thread = -(-_CODES_PER_THREAD // codes)

    def __call__(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        plan, query = self._plan, tensors["query"].float()
        batch, heads = query.shape[:2]
        output = query.new_empty(batch, 1, heads, plan.head_dims[1])
        if self._wide:  # float64: the C++ code knows 32 bits at most
            tensors = tensors | {name: tensors[name].float() for name in self._wide}
        call = [0] * _CALL_LENGTH
        for index, name, size in self._slots:
            tensor = tensors[name]
            shape, (row, head, block, *_) = tensor.shape, tensor.stride()
            call[index] = tensor.data_ptr()
            # A size of 1 stands for all rows (rotary tables) or all heads (scales of axis "tensor").
            call[index + 1] = row * size if shape[0] > 1 else 0
            call[index + 2] = head * size if shape[1] > 1 else 0
            call[index + 3] = block * size
        blocks, threads, splits = self._split(batch, tensors["key.planes.0"].shape[2])
        sinks = tensors["key.sinks"].shape[2] if plan.sinks else 0
        call[:6] = batch, blocks, sinks, tensors["key.recent"].shape[2], splits, threads
        if plan.masked:
            call[7:9] = tensors["mask.blocks"].data_ptr(), tensors["mask.exact"].data_ptr()
        learned = tensors["auxiliary"].float().contiguous() if plan.auxiliary else None
        call[9] = 0 if learned is None else learned.data_ptr()
        call[6], call[10] = query.data_ptr(), output.data_ptr()
        packed = array("q", call)
        self._run(ctypes.addressof(self._form), packed.buffer_info()[0])
        return output.to(tensors["query"].dtype)

    def _split(self, batch: int, blocks: int) -> tuple[int, int, int]:
        """Blocks, threads, and runs of blocks per KV head."""
        threads = max(1, min(torch.get_num_threads(), batch * blocks // self._blocks_per_thread))
        runs = batch * (1 if self._shared else self._plan.heads)
        wanted = 1 if threads == 1 else -(-_TASKS_PER_THREAD * threads // runs)
        return blocks, threads, max(1, min(blocks, wanted))

    def _new_form(self, tensors: dict[str, torch.Tensor]) -> _Form:
        plan = self._plan
        form = _Form(
            heads=plan.heads,
            repeats=plan.repeats,
            key_dim=plan.head_dims[0],
            value_dim=plan.head_dims[1],
            block_length=plan.block_length,
            element=_ELEMENTS.get(tensors["key.recent"].dtype, 0),
            turns_centre=plan.turns_centre,
            stores_raw=plan.stores_raw,
            scaling=plan.scaling,
            softcap=plan.softcap,
            key=self._new_spec(plan.key, plan.head_dims[0]),
            value=self._new_spec(plan.value, plan.head_dims[1]),
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

    def _new_spec(self, spec: TensorSpec, head_dim: int) -> _Spec:
        fmt = spec.number_format
        if fmt.lossless:
            return _Spec(lossless=1, tokens_per_group=1, channels_per_group=1, groups=1)
        layout, segments = planes_of(spec, head_dim), spec.segments(head_dim)
        per_group = spec.channels_per_group(head_dim)
        form = _Spec(
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
            for part in plane.parts:
                form.part[form.parts] = _Part(index, part.start, part.stop, part.place, part.shift)
                form.parts += 1
        for index, (each, start, stop) in enumerate(segments):
            middle = _middle(each, layout, start, uniform=stop - start == head_dim)
            form.segment[index] = _Segment(start, stop, each.step, offset_of(each, spec) - middle * each.step)
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


def _middle(fmt: NumberFormat, layout: tuple[Plane, ...], start: int, uniform: bool) -> int:
    """What the C++ code subtracts from the codes of the channels from ``start`` on: the middle of their range where
    planes are put together, else that of each plane."""
    if fmt.kind == "table":
        return 0
    if uniform:
        return 2 ** (fmt.bits - 1)
    return sum(2 ** (plane.width - 1 + part.shift) for plane in layout for part in plane.parts if part.start == start)


_HEADER = 11


def _slots() -> list[tuple[int, str]]:
    """Where in a call the pointer of each tensor is, three strides behind it."""
    names = [
        f"{side}.{part}" for side in ("key", "value") for part in (*(f"planes.{i}" for i in range(_MAX_PLANES)), *_SIDE)
    ]
    return [(_HEADER + 4 * index, name) for index, name in enumerate([*names, "cos", "sin"])]


_CALL_LENGTH = _HEADER + 4 * len(_slots())

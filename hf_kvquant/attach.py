"""attach(model): lets the cache see the rotation of the keys it is given.

Decision: one forward pre-hook per attention module, one hook that takes back what the cache did not use, and nothing
else: no forward is replaced, no module gets a new attribute, so accelerate, PEFT, pickling, torch.compile and a
second model of the same class go on as before. The hook leaves what it saw on the *cache* of this call
(``cache.pending``), never on the module: a model may serve several threads, each with its own cache, and some models
update other layer indices than the module's own. Queries that our attention is to show after the update are awaited by
the layer of the cache, which the thread finds until the module's forward ends (``energies.py``). With any other cache,
or none, the hook does nothing.

A module counts as attention if it has a ``layer_idx`` (gpt_neo: ``layer_id``), takes a cache, and holds no other such
module.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from typing import Any

import torch
from transformers import EncoderDecoderCache

from hf_kvquant import energies
from hf_kvquant._compat import attention_of
from hf_kvquant.attention import interface
from hf_kvquant.attention.backends import Choice, choose
from hf_kvquant.cache import QuantizedKVCache
from hf_kvquant.probing import probe
from hf_kvquant.queries import read_queries
from hf_kvquant.rotary import NO_ROPE, Pending, RotaryLayout

_DROPS_CACHE = ("phi3", "phimoe")
_CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "layer_past")


class _CaptureHook:
    """Pre-hook of one attention module; picklable. ``uses`` counts the attachments that want it."""

    def __init__(self, module: torch.nn.Module):
        self.names = [name for name in inspect.signature(module.forward).parameters if name != "self"]
        self.boundary = _longrope_boundary(module)
        self.uses = 0
        self.layout: RotaryLayout | None = None
        self.reason: str | None = None  # why there is no layout; None until probed
        self.last: weakref.ref[QuantizedKVCache] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"last": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        interface.register()  # the configuration of the pickled model names our attention

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            energies.begin()
        arguments = dict(zip(self.names, args, strict=False)) | kwargs if args else kwargs
        name, cache = _cache_in(arguments)
        if cache is None:
            self._warn_if_dropped(module, arguments)
            return
        cache.pending = self._pending(module, arguments, name, cache)
        self._remember(cache)

    def _pending(
        self, module: torch.nn.Module, arguments: dict[str, Any], name: str, cache: QuantizedKVCache
    ) -> Pending:
        queries = functools.partial(read_queries, module, arguments, name)
        attends = module if interface.parse(attention_of(module)) is not None else None
        if not cache.wants_rotation:
            return Pending(None, "", queries, attends=attends)
        if self.layout is None and self.reason is None:
            self._probe(module, arguments, name)
        if self.layout is None:
            return Pending(None, self.reason or "", queries, attends=attends)
        return Pending.of(self.layout, arguments["position_embeddings"], queries, attends)

    def release(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook: what the cache did not take in the call (cross-attention, shared layers) is not left on it, or
        it would keep activations alive and travel with every copy of the cache."""
        if not torch.compiler.is_compiling():
            energies.finish(module)
        _, cache = _cache_in(dict(zip(self.names, args, strict=False)) | kwargs if args else kwargs)
        if cache is not None:
            cache.pending = None

    def _probe(self, module: torch.nn.Module, arguments: dict[str, Any], cache_name: str) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"attach: how {type(module).__name__} rotates is not known yet, and it cannot be probed under "
                "torch.compile; run one forward with the cache before compiling"
            )
        embeddings = arguments.get("position_embeddings")
        if embeddings is None:
            self.reason = _reason_without_tables(module)
        elif not isinstance(embeddings, torch.Tensor | tuple):
            self.reason = f"its position embeddings are a {type(embeddings).__name__}, not tables of cos and sin"
        else:
            self.layout, self.reason = probe(module, arguments, cache_name)

    def _remember(self, cache: QuantizedKVCache) -> None:
        """Only models with a longrope boundary drop a cache; nothing is kept for the others."""
        if self.boundary and not torch.compiler.is_compiling():
            self.last = weakref.ref(cache)

    def _warn_if_dropped(self, module: torch.nn.Module, arguments: dict[str, Any]) -> None:
        """phi3 and phimoe recompute the whole sequence with a new cache when it crosses the longrope boundary; older
        releases of transformers drop the cache as well, but go on with the newest token alone."""
        cache = None if self.last is None else self.last()
        if cache is None:
            return
        boundary = self.boundary
        if arguments["hidden_states"].shape[1] in (1, boundary + 1) and cache.get_seq_length() == boundary:
            self.last = None
            warnings.warn(
                f"{type(module).__name__}: the model dropped the QuantizedKVCache at its longrope boundary of "
                f"{boundary} tokens and goes on with a full-precision cache; pass longer prompts, or a lower "
                "max_new_tokens, to stay on one side of it",
                stacklevel=2,
            )


def _longrope_boundary(module: torch.nn.Module) -> int:
    config = getattr(module, "config", None)
    boundary = getattr(config, "original_max_position_embeddings", None)
    return boundary if isinstance(boundary, int) and getattr(config, "model_type", "") in _DROPS_CACHE else 0


def _reason_without_tables(module: torch.nn.Module) -> str:
    """By the names of submodules (moshi, recurrent_gemma) and of methods (roformer), or the size of what is rotated
    (GPT-J and CodeGen before transformers 5.24)."""
    names = (name for each in module.modules() for name in (type(each).__name__, *dir(type(each))))
    inside = hasattr(module, "rotary_dim") or any("rotary" in name.lower() for name in names)
    return "rotates inside the attention module, out of sight" if inside else NO_ROPE


def _cache_in(arguments: dict[str, Any]) -> tuple[str, QuantizedKVCache | None]:
    """The cache among the arguments of a call, if it is one of ours, and its name."""
    for name in _CACHE_NAMES:
        cache = arguments.get(name)
        if cache is not None:
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            return name, cache if isinstance(cache, QuantizedKVCache) else None
    return "", None


def attention_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The innermost modules with a layer index that take a cache."""
    takers = [module for module in model.modules() if _has_index(module) and _takes_cache(module)]
    return [each for each in takers if not any(other in takers for other in each.modules() if other is not each)]


def _has_index(module: torch.nn.Module) -> bool:
    return hasattr(module, "layer_idx") or hasattr(module, "layer_id")


def _takes_cache(module: torch.nn.Module) -> bool:
    return any(name in inspect.signature(module.forward).parameters for name in _CACHE_NAMES)


class AttachHandle:
    """What ``attach`` returns; ``detach()`` takes the hooks off again, and so does leaving the ``with`` block.

    Attributes:
        backend: how decode steps attend, and why: a ``Choice``.
    """

    def __init__(self, modules: list[torch.nn.Module], backend: Choice, name: str):
        self.backend = backend
        self._modules = modules
        self._obstacles = [interface.obstacle(module) for module in modules]
        for module, obstacle in zip(modules, self._obstacles, strict=True):
            _hook_of(module).uses += 1
            if backend.name != "full" and not obstacle:
                interface.switch(module, name)

    def summary(self) -> str:
        """How decode steps attend, and which layers cannot attend to codes, for what reason; one line each."""
        lines = [f"decode attention: {self.backend.name} ({self.backend.reason})"]
        for reason in dict.fromkeys(each for each in self._obstacles if each):
            layers = [str(index) for index, each in enumerate(self._obstacles) if each == reason]
            lines.append(f"attention modules {', '.join(layers)}: over full tensors, because {reason}")
        return "\n".join(lines)

    def detach(self) -> None:
        """Remove the hooks, unless another attachment of the same model is still in force. A second call does
        nothing."""
        modules, self._modules = self._modules, []
        for module in modules:
            hooks = module._forward_pre_hooks
            key = next((key for key, hook in hooks.items() if isinstance(hook, _CaptureHook)), None)
            if key is None:
                continue
            hooks[key].uses -= 1
            if not hooks[key].uses:
                hook = hooks.pop(key)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                _remove_release(module, hook)
                interface.restore(module)

    def __enter__(self) -> AttachHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _hook_of(module: torch.nn.Module) -> _CaptureHook:
    """The module's hook, registered where there is none yet."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _CaptureHook):
            return hook
    hook = _CaptureHook(module)
    module.register_forward_pre_hook(hook, with_kwargs=True)
    module.register_forward_hook(hook.release, with_kwargs=True)
    return hook


def _remove_release(module: torch.nn.Module, capture: Any) -> None:
    for key, hook in list(module._forward_hooks.items()):
        if getattr(hook, "__self__", None) is capture:
            module._forward_hooks.pop(key)
            module._forward_hooks_with_kwargs.pop(key, None)


def attach(model: torch.nn.Module, backend: str = "auto") -> AttachHandle:
    """Let quantized caches see how ``model`` rotates its keys, and let its decode steps attend to their packed codes.

    Use as a context manager, or keep the handle and call ``detach()``. Attaching twice is the same as once, with as
    many detachments. A multimodal model has the attention of its text decoder attached. With any other cache the
    model computes exactly what it did before.

    Args:
        model: a transformers model, or a module that holds one (PEFT, accelerate).
        backend: how decode steps attend: "native" (C++, on a CPU), "compiled" (the same by torch.compile), "reference"
            (an fp32 oracle, slow), "full" (the model's own attention over full tensors), or "auto": native on a CPU
            with a C++ compiler, else full. The handle says what was chosen and why (``handle.summary()``).

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no module in it takes a cache, there is no such backend, or the model is attached with another.
        RuntimeError: the backend asked for cannot run here.

    Source: pre-RoPE keys as in KVQuant (Hooper et al. 2024, arXiv 2401.18079, section 3.2).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={type(model).__name__} is not valid: pass the model itself, a torch.nn.Module")
    modules = attention_modules(model)
    if not modules:
        raise ValueError(
            f"model={type(model).__name__} is not valid: no module in it has a layer_idx and takes a cache; pass a "
            "transformers model with attention layers"
        )
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    choice = choose(backend, device)
    if backend == "auto" and choice.name == "full" and device.type == "cpu":
        warnings.warn(
            f"decode attention reads full tensors: {choice.reason}; install one, or say backend='full'", stacklevel=2
        )
    in_force = "full" if choice.name == "full" else backend
    for module in modules:
        held = _backend_in_force(module)
        if held not in ("", in_force):
            raise ValueError(
                f"backend={backend!r} is not valid: the model is attached with backend={held!r} already; detach that "
                "handle first, or ask for the same"
            )
    return AttachHandle(modules, choice, backend)


def _backend_in_force(module: torch.nn.Module) -> str:
    """How an attached module attends; empty where it is not attached, or cannot attend to codes."""
    attached = any(isinstance(hook, _CaptureHook) for hook in module._forward_pre_hooks.values())
    if not attached or interface.obstacle(module):
        return ""
    name = interface.parse(attention_of(module))
    return "full" if name is None else name[0]

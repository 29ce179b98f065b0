"""Reading the queries of an attention call, for statistics that weigh keys by what is asked of them.

Decision: where attention of ours does not show them in time (``energies.py``), that is in a prefill that closes the
first block and in modules that attend in another way, the module's own forward is run once more on the few tokens that
are still to be counted (at most ``sinks + calibration_length`` of a sequence), on a shallow copy of the module whose
configuration names an attention function of ours; that function ends the forward with the queries before any attention
is computed. So every projection, norm, bias, adapter and rotation is the model's own, the module itself is not touched,
and the cost is one projection of those tokens. Rejected: hooks on ``q_proj`` and its kin, which are named and normed
differently in each model. Attention written out in the module, without transformers' interface, shows no queries.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_kvquant._compat import with_attention

_NAME = "hf_kvquant_queries"
_lock = threading.Lock()
_users = 0


class _QueriesError(Exception):
    """Carries the queries out of the forward."""

    def __init__(self, queries: torch.Tensor):
        self.queries = queries.detach()


def _stop(module: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    raise _QueriesError(query)


@contextmanager
def _registered() -> Iterator[None]:
    """Our attention function is known to transformers only while it is in use, by whichever threads."""
    global _users
    with _lock:
        _users += 1
        ALL_ATTENTION_FUNCTIONS[_NAME] = _stop
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                del ALL_ATTENTION_FUNCTIONS[_NAME]


def read_queries(
    module: torch.nn.Module, arguments: dict[str, Any], cache_name: str, start: int, stop: int
) -> torch.Tensor | str:
    """Queries ``[B, H, stop - start, D]`` of the tokens ``start .. stop`` as they meet the keys, or why they are not
    seen.

    Args:
        module: an attention module.
        arguments: those of the call in progress, by name.
        cache_name: name of the argument that takes the cache.
        start, stop: tokens of the call.

    Raises:
        RuntimeError: under torch.compile.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"attach: the queries of {type(module).__name__} cannot be read under torch.compile; run the first tokens "
            "of a sequence, sinks and calibration_length, uncompiled"
        )
    if not hasattr(module, "config"):
        return "the attention module has no configuration"
    twin = copy.copy(module)
    twin.config = with_attention(module.config, _NAME)
    length = arguments["hidden_states"].shape[1]
    few = {name: _tokens(value, length, start, stop) for name, value in arguments.items()}
    few |= {cache_name: DynamicCache(), "attention_mask": None}
    devices = [arguments["hidden_states"].device] if arguments["hidden_states"].is_cuda else []
    try:
        with _registered(), torch.no_grad(), torch.random.fork_rng(devices=devices):
            type(module).forward(twin, **few)
    except _QueriesError as found:
        return found.queries
    except Exception as error:  # any failure of foreign code means: cannot be seen
        return f"reading the queries failed: {type(error).__name__}: {str(error)[:100]}"
    return "attention does not go through transformers' interface"


def _tokens(value: Any, length: int, start: int, stop: int) -> Any:
    """The tokens ``start .. stop`` of an argument that holds one entry per token; everything else as it is. Contiguous:
    some models flatten their input by ``view``."""
    if isinstance(value, tuple):
        return tuple(_tokens(item, length, start, stop) for item in value)
    if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length:
        return value[:, start:stop].contiguous()
    return value

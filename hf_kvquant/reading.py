"""How a token sequence is read through a cache: in which pieces, and what is kept to be read on from.

Decisions:
- A piece attends to what the cache stored of the pieces before it, and to itself in full precision. So quantization
  shows only from one piece to the next; where the cuts are belongs to a result as much as the scheme does. Cuts lie at
  multiples of ``chunk`` from the first token on, a function of the request alone: neighbours and order change nothing.
- "two-phase": the haystack in one piece, then the last tokens (the question) in chunks; "chunked": everything in
  chunks, as servers with chunked prefill do.
- The state after the haystack is kept and forked, so that the questions on one text, the continuations of one context,
  and generating and scoring one answer cost one prefill. It is the state that a fresh cache would have.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from hf_kvquant._compat import cache_argument
from hf_kvquant.schemes import EvalError, cache_nbytes, fork

TWO_PHASE, CHUNKED = "two-phase", "chunked"


@dataclass(frozen=True)
class ReadingPlan:
    """Where a sequence is cut.

    Attributes:
        prefill: "two-phase" or "chunked".
        tail: at least this many of a prompt's last tokens are read against the cache, after the haystack.
        chunk: tokens per piece; 1 is true decoding.

    Raises:
        EvalError: another ``prefill``, or a ``tail`` or ``chunk`` that is no integer of at least 1.
    """

    prefill: str = TWO_PHASE
    tail: int = 64
    chunk: int = 64

    def __post_init__(self) -> None:
        if self.prefill not in (TWO_PHASE, CHUNKED):
            raise EvalError(f"prefill={self.prefill}: choose {TWO_PHASE} or {CHUNKED}")
        for name, value in (("prefill_tail", self.tail), ("score_chunk", self.chunk)):
            if type(value) is not int or value < 1:
                raise EvalError(f"{name}={value}: it must be an integer of at least 1")

    def haystack(self, tokens: int) -> int:
        """Length of the haystack of a prompt of ``tokens``: a multiple of the chunk, the tail left out."""
        return max(0, tokens - self.tail) // self.chunk * self.chunk

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """``(start, stop)`` of the pieces of the tokens from ``start`` to ``stop``, cut at multiples of the chunk."""
        while start < stop:
            end = min((start // self.chunk + 1) * self.chunk, stop)
            yield start, end
            start = end

    def haystack_pieces(self, tokens: int) -> Iterator[tuple[int, int]]:
        """``(start, stop)`` of the pieces that a haystack of ``tokens`` is read in."""
        if self.prefill == CHUNKED:
            yield from self.pieces(0, tokens)
        elif tokens:
            yield 0, tokens


class Reader:
    """Reads token ids with a model, each request through a cache of its own.

    Args:
        model: a causal language model.
        build: makes an empty cache.
        plan: where sequences are cut.
        kept_nbytes: most bytes of prefilled caches that are kept for reuse.
        softmax_dtype: in which likelihoods are computed.

    Attributes:
        kept: prefilled caches by their tokens, those used longest ago first.
    """

    def __init__(
        self,
        model: Any,
        build: Callable[[], Cache],
        plan: ReadingPlan,
        kept_nbytes: int,
        softmax_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.build = build
        self.plan = plan
        self.kept_nbytes = kept_nbytes
        self.softmax_dtype = softmax_dtype
        self.kept: OrderedDict[tuple[int, ...], tuple[Cache, int]] = OrderedDict()
        self.argument = cache_argument(model.forward)
        self.takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def read(self, cache: Cache, ids: Sequence[int], start: int, stop: int, logits: int = 1) -> torch.Tensor:
        """Feed the tokens of ``ids`` from ``start`` to ``stop`` into ``cache``; logits ``[logits, V]`` of the last of
        them."""
        tokens = torch.tensor([ids[start:stop]], device=self.model.device)
        options: dict[str, Any] = {"use_cache": True, self.argument: cache}
        if self.takes_logits_to_keep:
            options["logits_to_keep"] = logits
        return self.model(input_ids=tokens, **options).logits[0, -logits:]

    def prefill(self, prompt: Sequence[int]) -> tuple[Cache, int]:
        """A cache that has read the haystack of ``prompt``, and how many tokens that are."""
        length = self.plan.haystack(len(prompt))
        if not length:
            return self.build(), 0
        key = tuple(prompt[:length])
        if key in self.kept:
            self.kept.move_to_end(key)
            return fork(self.kept[key][0]), length
        cache = self.build()
        for start, stop in self.plan.haystack_pieces(length):
            self.read(cache, prompt, start, stop)
        return self._keep(key, cache), length

    def _keep(self, key: tuple[int, ...], cache: Cache) -> Cache:
        """Keep a prefilled cache, those used longest ago giving way, and fork it; one too large is handed on."""
        nbytes = cache_nbytes(cache)
        if nbytes > self.kept_nbytes:
            return cache
        while sum(size for _, size in self.kept.values()) + nbytes > self.kept_nbytes:
            self.kept.popitem(last=False)
        self.kept[key] = (cache, nbytes)
        return fork(cache)

    @torch.no_grad()
    def score(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool, Cache]:
        """Log-likelihood in nats of ``continuation`` after ``context`` (at least one token), whether greedy decoding
        would say the same, and the cache as it is then (the last token is not in it)."""
        ids = [*context, *continuation][:-1]
        first = len(context) - 1  # its logits predict the continuation's first token
        cache, read = self.prefill(context)
        found = []
        for start, stop in self.plan.pieces(read, len(ids)):
            wanted = min(stop - start, stop - first)
            logits = self.read(cache, ids, start, stop, max(wanted, 1))
            if wanted > 0:
                found.append(self._judge(logits, continuation[stop - wanted - first : stop - first]))
        return sum(each[0] for each in found), all(each[1] for each in found), cache

    def _judge(self, logits: torch.Tensor, targets: Sequence[int]) -> tuple[float, bool]:
        """Log-likelihood of the ``targets``, and whether each is the most likely token."""
        wanted = torch.tensor(targets, device=logits.device)
        likely = logits.log_softmax(-1, dtype=self.softmax_dtype).gather(-1, wanted[:, None])
        return float(likely.double().sum()), bool((logits.argmax(-1) == wanted).all())

    @torch.no_grad()
    def ready(self, prompt: Sequence[int]) -> Cache:
        """A cache that has read all of ``prompt`` but its last piece, for ``generate`` to go on with."""
        cache, read = self.prefill(prompt)
        for start, stop in list(self.plan.pieces(read, len(prompt)))[:-1]:
            self.read(cache, prompt, start, stop)
        return cache

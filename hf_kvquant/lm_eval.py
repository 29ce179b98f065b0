"""The lm-eval model type ``hf-kvquant``: Hugging Face models as lm-eval runs them, with every request through a cache.

Decisions:
- lm-eval's own HFLM scores with one forward and no cache, and generates after one prefill that no code was read in; a
  quantized cache then changes little or nothing. Here both go through :class:`hf_kvquant.reading.Reader`.
- One sequence at a time: padding would enter the statistics of schemes that cannot leave it out, and a result would
  depend on its neighbours. ``accelerate launch`` spreads requests over processes instead.
- What ran (scheme, bits, bytes, pieces) is part of ``get_model_info()`` and so of the results file. A response cache
  (``--use_cache``) belongs to one scheme: it is marked, and refused to any other.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval.api.model import CacheHook
from lm_eval.models import huggingface
from tqdm import tqdm
from transformers import Cache

from hf_kvquant._compat import cache_argument
from hf_kvquant.attach import attach as attach_model
from hf_kvquant.attention.backends import choose
from hf_kvquant.models import SMOLLM2, source_of
from hf_kvquant.presets import ATTACHED_DEFAULT
from hf_kvquant.reading import TWO_PHASE, Reader, ReadingPlan
from hf_kvquant.schemes import EvalError, Scheme, as_json, bits_held, cache_nbytes, elements_held, find_scheme
from hf_kvquant.spec import first_line

OWNER = "hf-kvquant: what these responses depend on"  # key in a response cache, beside lm-eval's hashes
HELD = "hf-kvquant: the longest cache of these responses"
ELSEWHERE = {"device", "batch_size", "max_batch_size"}  # options that change where and when, not what is answered
DTYPES = ("dtype", "softmax_dtype", "mixed_precision_dtype")
MIB = 2**20
HFLM: Any = huggingface.HFLM  # lm-eval's decorator hides the class from type checkers


class KVQuantLM(HFLM):
    """A causal model whose requests all go through the cache that ``kv_cache`` names.

    Args:
        pretrained: hub id, folder, "SmolLM2-135M-Instruct" (converted locally, no hub needed), or a loaded model.
        kv_cache: preset, path of a KVQuantConfig as JSON, "none" (DynamicCache), or "transformers:quanto4", "hqq4",
            "fp8" and so on (its QuantizedCache).
        residual_length: tokens of the exact window instead of the scheme's own.
        attach: True, False, or "auto" to attach where the scheme needs it; the model stays attached.
        prefill: "two-phase" (the haystack in one piece, then the tail in chunks) or "chunked".
        prefill_tail: at least this many of a prompt's last tokens are read after the haystack.
        score_chunk: tokens per piece; 1 is true decoding.
        prefix_cache_mib: most MiB of prefilled caches that are kept for requests with the same haystack.
        **options: all that HFLM takes. ``logits_cache`` is superseded: equal contexts share their prefill.
            ``softmax_dtype`` is float32 where it is not given.

    Raises:
        EvalError: a value that is not valid, a scheme that needs ``attach`` without it, a batch size other than 1, a
            model that cannot be loaded or is not a causal language model.
    """

    def __init__(
        self,
        pretrained: Any = SMOLLM2,
        kv_cache: str = ATTACHED_DEFAULT,
        residual_length: int | None = None,
        attach: bool | str = "auto",
        prefill: str = TWO_PHASE,
        prefill_tail: int = 64,
        score_chunk: int = 64,
        prefix_cache_mib: int = 1024,
        **options: Any,
    ) -> None:
        self.scheme = find_scheme(str(kv_cache), residual_length)
        self.plan = ReadingPlan(prefill, prefill_tail, score_chunk)
        if type(prefix_cache_mib) is not int or prefix_cache_mib < 0:
            raise EvalError(f"prefix_cache_mib={prefix_cache_mib}: it must be an integer of at least 0")
        self.attached = _wants_attach(attach, self.scheme)
        if str(options.get("batch_size", 1)) != "1":
            raise EvalError(
                f"batch_size={options['batch_size']}: requests are read one by one, so that no padding enters a cache; "
                "leave it at 1, and use accelerate launch for more processes"
            )
        _check_options(options)
        self.options = {name: _plain(value) for name, value in options.items() if name not in ELSEWHERE}
        self._load(pretrained, options)
        named = pretrained if isinstance(pretrained, str) else type(pretrained).__name__
        if self.backend != "causal":
            raise EvalError(f"pretrained={named}: it is no causal language model; name one")
        try:
            self.scheme.build(self.model.config)
        except ValueError as error:
            raise EvalError(
                f"kv_cache={self.scheme.name}: not for pretrained={named} ({first_line(error)}); choose another"
            ) from error
        choice = attach_model(self.model).backend if self.attached else choose("auto", self.device)
        self.decode_attention = choice.name if self.scheme.config is not None else "full"
        self.reader = Reader(
            self.model,
            lambda: self.scheme.build(self.model.config),
            self.plan,
            prefix_cache_mib * MIB,
            self.softmax_dtype or torch.float32,
        )
        self.held: dict[str, Any] = {"kv_tokens": 0}
        self.responses: Any = None

    def _load(self, pretrained: Any, options: dict[str, Any]) -> None:
        """HFLM's own loading; what cannot be loaded is one line."""
        has_cuda = torch.cuda.is_available()
        device = options.setdefault("device", "cuda" if has_cuda else "cpu")
        if device == "cuda" and not has_cuda:
            raise EvalError("device=cuda: torch finds no CUDA device here; leave it out, or choose cpu")
        try:
            super().__init__(source_of(pretrained) if isinstance(pretrained, str) else pretrained, **options)
        except TypeError as error:
            raise EvalError(
                f"model_args: {first_line(error)}; give those of lm-eval's model type hf and of KVQuantLM alone"
            ) from error
        except (OSError, ValueError) as error:
            raise EvalError(
                f"pretrained={pretrained}: neither a model folder nor a hub id that loads ({first_line(error)})"
            ) from error

    # ---------------------------------------------------------------- requests

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Log-likelihood and greedy match of each (strings, context ids, continuation ids), equal contexts in turn."""
        answers: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda index: [*requests[index][1], *requests[index][2]])
        bar = tqdm(order, desc="Running loglikelihood requests", disable=disable_tqdm or self.rank != 0)
        for index in bar:
            strings, context, continuation = requests[index]
            context = self._fitting(context, continuation)
            with self._autocast():
                likelihood, greedy, cache = self.reader.score(context, continuation)
            self._note(cache)
            answers[index] = (likelihood, greedy)
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answers[index])
        return [answers[index] for index in range(len(requests))]

    def _fitting(self, context: list[int], continuation: list[int]) -> list[int]:
        """The context that the model's length leaves room for; lm-eval cuts it on the left as well."""
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise EvalError(
                f"a continuation of {len(continuation)} tokens: the model ends at max_length={self.max_length}; "
                "shorten it"
            )
        return context[-room:]

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """HFLM's generation, ``[1, T]`` ids to ``[1, T + new]``, with all of the context but its last piece read in
        beforehand."""
        for name in ("num_beams", "num_return_sequences"):
            if (value := generation_kwargs.get(name, 1)) != 1:
                raise EvalError(f"{name}={value}: a request is one sequence; leave it at 1")
        if own := {"cache_implementation", "cache_config", "past_key_values", "cache", "use_cache"} & {
            *generation_kwargs
        }:
            raise EvalError(f"{', '.join(sorted(own))}: the cache is the one that kv_cache names; leave it out")
        with self._autocast():
            cache = self.reader.ready(context[0].tolist())
        generation_kwargs[cache_argument(self.model.forward)] = cache
        output = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self._note(cache)
        return output

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    # ---------------------------------------------------------------- what ran

    def _note(self, cache: Cache) -> None:
        """Keep the measures of the longest cache of the run."""
        tokens = int(cache.get_seq_length())
        if tokens <= self.held["kv_tokens"]:
            return
        bits = bits_held(cache, elements_held(cache, self.model))
        self.held = {
            "kv_tokens": tokens,
            "kv_cache_nbytes": cache_nbytes(cache),
            "kv_bits_per_element": bits["all"],
            "kv_true_bits_per_element": bits["true"],
            "kv_block_bits_per_element": bits["blocks"],
        }
        if self.responses is not None:
            self.responses[HELD] = self.held

    def identity(self) -> dict[str, Any]:
        """Everything that an answer depends on, beside the request."""
        return {
            "pretrained": self.pretrained if isinstance(self.pretrained, str) else type(self.model).__name__,
            "dtype": [str(self.model.dtype), str(self.mixed_precision_dtype), str(self.reader.softmax_dtype)],
            "max_length": self.max_length,
            "scheme": self.scheme.identity,
            "attached": self.attached,
            "decode_attention": self.decode_attention,
            "plan": vars(self.plan),
            "options": self.options,
        }

    def get_model_info(self) -> dict[str, Any]:
        """lm-eval's entries, the scheme, where sequences were cut, and the longest cache of the run.

        Of that cache: tokens, bytes, and bits per key or value element, of all bytes, without window, sinks and unused
        capacity ("true"), and of codes, scales and zero points alone ("block").
        """
        plan = self.plan
        return super().get_model_info() | {
            "kv_cache": self.scheme.name,
            "kv_scheme": self.scheme.identity,
            "kv_attached": self.attached,
            "kv_decode_attention": self.decode_attention,
            "kv_prefill": plan.prefill,
            "kv_prefill_tail": plan.tail,
            "kv_score_chunk": plan.chunk,
            **self.held,
        }

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Take the response cache of ``cache_hook``, with what was measured of its answers, unless they are those of
        another scheme.

        Raises:
            EvalError: the file is another scheme's, or not marked as anyone's.
        """
        if cache_hook.dbdict is not None:
            self._claim(cache_hook.dbdict)
            self.responses = cache_hook.dbdict
            self.held = self.responses.get(HELD, self.held)
        super().set_cache_hook(cache_hook)

    def _claim(self, responses: Any) -> None:
        own, owner = as_json(self.identity()), responses.get(OWNER)
        if owner is None and not len(responses):
            responses[OWNER] = own
        elif owner != own:
            whose = "an unknown model" if owner is None else "another scheme, model or chunking"
            raise EvalError(f"use_cache: the file {responses.filename} holds responses of {whose}; name a new file")


def _check_options(options: dict[str, Any]) -> None:
    """What HFLM would only stumble over."""
    length = options.get("max_length")
    if length is not None and (type(length) is not int or length < 1):
        raise EvalError(f"max_length={length}: it must be an integer of at least 1")
    for name in DTYPES:
        value = options.get(name)
        if isinstance(value, str) and value != "auto" and not isinstance(getattr(torch, value, None), torch.dtype):
            raise EvalError(f"{name}={value}: torch has no such dtype; choose float32, bfloat16 or float16")


def _plain(value: Any) -> Any:
    """A value for JSON; of an object, such as a tokenizer, its class."""
    return value if value is None or isinstance(value, str | int | float | dict | list) else type(value).__name__


def _wants_attach(attach: bool | str, scheme: Scheme) -> bool:
    if attach == "auto":
        return scheme.needs_attach
    if not isinstance(attach, bool):
        raise EvalError(f"attach={attach}: choose True, False or auto")
    if scheme.needs_attach and not attach:
        raise EvalError(f"attach=False: kv_cache={scheme.name} needs an attached model; choose auto or another scheme")
    return attach

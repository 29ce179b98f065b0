"""Samples of the long-context tasks: how one is drawn, and how it is fitted to a length in tokens.

Decisions:
- A sample is a function of (seed, task, length, depth, index) alone: its random numbers come from the SHA-256 of these,
  never from a shared generator, so task order, ``--limit`` and processes change nothing.
- Lengths are exact in the tokens of the model's own tokenizer: prompt, beginning of the answer and answer, with the
  chat template, take more than 95 % and at most 100 % of the length that was asked for.
- A depth is a share of the haystack, to the nearest end of a clause: sentences of a novel are too long to be the grid.
- Lengths and depths alternate from sample to sample, so that the first n are a fair share of the grid.
"""

from __future__ import annotations

import bisect
import functools
import gzip
import hashlib
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, AutoTokenizer

from hf_kvquant.models import source_of
from hf_kvquant.prompt import data_path, largest
from hf_kvquant.schemes import EvalError
from hf_kvquant.spec import first_line

CLAUSE_END = re.compile(r"[.;:!?,][\"']? ")
DELIMITER = " "  # between the beginning of an answer and the answer
SHORTEST = 0.95  # share of the length that a sample takes at least


@dataclass(frozen=True)
class Ask:
    """A question, the beginning of its answer, and the answers that must follow it, in this order."""

    question: str
    start: str
    answers: tuple[str, ...]
    separator: str = ", "

    @property
    def target(self) -> str:
        return self.separator.join(self.answers)


@dataclass(frozen=True)
class Draft:
    """A sample before it is fitted.

    Attributes:
        haystack: number of units (words, sentences, lines) -> text with everything hidden in it.
        least, most: units that the haystack may have.
        ask: what is asked of it.
        others: all that may be asked of the same haystack, which is fitted to the longest, so that they share it.
    """

    haystack: Callable[[int], str]
    least: int
    most: int
    ask: Ask
    others: tuple[Ask, ...] = ()


@dataclass(frozen=True)
class Kind:
    """A kind of task: its name and how a sample is drafted from (random numbers, depth, tokens). Samples whose depths
    are 1 / ``shared`` apart get the same random numbers, and so one haystack."""

    name: str
    draft: Callable[[random.Random, float, int], Draft]
    shared: int = 1


@dataclass(frozen=True)
class Grid:
    """Lengths in tokens x depths in [0, 1] x samples of each."""

    lengths: tuple[int, ...] = (512, 1024)
    depths: tuple[float, ...] = (0.125, 0.375, 0.625, 0.875)
    samples: int = 4
    seed: int = 0

    @classmethod
    def of(cls, lengths: Any, depths: Any, samples: Any, seed: Any) -> Grid:
        """From what stands in ``--metadata``: single values or lists.

        Raises:
            EvalError: no or bad lengths, depths, samples or seed.
        """
        grid = cls(_listed(lengths), _listed(depths), samples, seed)
        for name, values, fine, allowed in (
            ("max_seq_lengths", grid.lengths, lambda x: type(x) is int and x > 0, "token counts"),
            ("depths", grid.depths, lambda x: type(x) in (int, float) and 0 <= x <= 1, "shares from 0 to 1"),
            ("samples_per_cell", (samples,), lambda x: type(x) is int and x > 0, "a positive integer"),
            ("data_seed", (seed,), lambda x: type(x) is int, "an integer"),
        ):
            if not values or not all(map(fine, values)):
                raise EvalError(f"{name}={lengths if name == 'max_seq_lengths' else list(values)}: expected {allowed}")
        return replace(grid, lengths=_distinct(grid.lengths), depths=_distinct(grid.depths))

    def cells(self) -> Iterator[tuple[int, float, int]]:
        """(length, depth, index) of every sample, lengths and depths alternating."""
        for index in range(self.samples):
            for depth in self.depths:
                for length in self.lengths:
                    yield length, depth, index


def _listed(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, list | tuple) else (values,)


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Each once: a document that is there twice would count twice."""
    return tuple(dict.fromkeys(values))


@dataclass(frozen=True)
class Counter:
    """Counts the tokens of a prompt and its answer as lm-eval will send them."""

    tokenizer: Any
    chat: bool = False

    def __call__(self, text: str, ask: Ask) -> int:
        return len(self.ids(text, ask.start, DELIMITER + ask.target))

    def ids(self, text: str, start: str, answer: str) -> list[int]:
        """Ids of the user's ``text``, the ``start`` of the reply and what follows it."""
        if not self.chat:
            return list(self.tokenizer(text + start + answer).input_ids)
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": start}]
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        has_bos = bool(self.tokenizer.bos_token) and prompt.startswith(self.tokenizer.bos_token)
        return list(self.tokenizer(prompt + answer, add_special_tokens=not has_bos).input_ids)

    def answer_tokens(self, ask: Ask) -> int:
        return len(self.tokenizer(DELIMITER + ask.target, add_special_tokens=False).input_ids)


def sample_rng(*identity: Any) -> random.Random:
    """Random numbers that depend on ``identity`` alone."""
    digest = hashlib.sha256("/".join(map(str, identity)).encode()).digest()
    return random.Random(int.from_bytes(digest, "big"))


def draw(kind: Kind, grid: Grid, count: Counter) -> list[dict[str, Any]]:
    """All samples of a task, as lm-eval's documents.

    Raises:
        EvalError: a length that is too short for the task.
    """
    documents = []
    for length, depth, index in grid.cells():
        drawn_at = round(depth % (1 / kind.shared), 6) if kind.shared > 1 else depth
        rng = sample_rng(grid.seed, kind.name, length, drawn_at, index)
        draft = kind.draft(rng, depth, length)
        text = fit(kind.name, draft, length, count, rng.random())
        place = {"task": kind.name, "length": length, "depth": float(depth), "index": index}
        asked = {"input": text, "gen_prefix": draft.ask.start, "target": draft.ask.target}
        counted = {"tokens": count(text, draft.ask), "answer_tokens": count.answer_tokens(draft.ask)}
        documents.append(place | asked | {"answers": list(draft.ask.answers)} | counted)
    return documents


def fit(name: str, draft: Draft, length: int, count: Counter, place: float) -> str:
    """The prompt of a draft with as many units as ``length`` tokens hold; where a unit is too coarse for that, some of
    the novel from ``place`` on comes first."""
    asks = draft.others or (draft.ask,)

    def prompt(units: int, words: int = 0, ask: Ask = draft.ask) -> str:
        passage = f"{' '.join(novel(place, words))}\n\n" if words else ""
        return f"{passage}{draft.haystack(units)}\n\n{ask.question}\n"

    def tokens(units: int, words: int = 0) -> int:
        return max(count(prompt(units, words, ask), ask) for ask in asks)

    shortest = tokens(draft.least)
    if shortest > length:
        raise EvalError(f"max_seq_lengths={length}: too short for {name}, which takes at least {shortest} tokens here")
    units = draft.least + largest(draft.most - draft.least, lambda more: tokens(draft.least + more) <= length)
    if tokens(units) > SHORTEST * length + 8:  # 8: other questions of the same haystack are shorter by less
        return prompt(units)
    return prompt(units, largest(length, lambda words: tokens(units, words) <= length))


# ---------------------------------------------------------------- texts


@functools.cache
def _novel_words() -> list[str]:
    return gzip.decompress(data_path("persuasion.txt.gz").read_bytes()).decode("utf-8").split()


def novel(place: float, count: int) -> list[str]:
    """``count`` words of Persuasion from a share of it on, round its end if need be."""
    words = _novel_words()
    start = int(place * len(words))
    return [words[(start + offset) % len(words)] for offset in range(count)]


def prose_haystack(place: float, needles: Sequence[tuple[float, str]]) -> Callable[[int], str]:
    """Number of words -> that much of the novel with each needle at its depth."""
    return lambda words: hide(" ".join(novel(place, words)), needles)


def hide(text: str, needles: Sequence[tuple[float, str]]) -> str:
    """``text`` with sentences put in at the ends of clauses that are nearest to their depths."""
    size = len(text)
    ends = [0, *(match.end() for match in CLAUSE_END.finditer(text)), size]
    for depth, needle in sorted(needles, reverse=True):
        cut = _nearest(ends, depth * size)
        before, after = text[:cut].rstrip(), text[cut:].lstrip()
        text = " ".join(part for part in (before, needle, after) if part)
    return text


def _nearest(values: Sequence[int], wanted: float) -> int:
    right = bisect.bisect_left(values, wanted)
    return min(values[max(right - 1, 0) : right + 1], key=lambda value: abs(value - wanted))


def insert_at(units: Sequence[str], depth: float, unit: str) -> list[str]:
    """``units`` with one more at a share of their number."""
    place = round(depth * len(units))
    return [*units[:place], unit, *units[place:]]


# ---------------------------------------------------------------- tokenizer and model length


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str) -> Any:
    """The tokenizer of a hub id, a folder or SmolLM2's name.

    Raises:
        EvalError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(source_of(name))
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise EvalError(f"tokenizer={name}: no tokenizer there ({reason}); name a folder or a hub id") from error


@functools.lru_cache(maxsize=4)
def model_length(name: str) -> int | None:
    """Positions that the model of a hub id or folder has; None where its configuration names no limit."""
    try:
        config = AutoConfig.from_pretrained(source_of(name))
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise EvalError(f"pretrained={name}: no configuration there ({reason}); name a folder or a hub id") from error
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)


def check_lengths(lengths: Sequence[int], limit: int | None, reply: int = 0) -> None:
    """Every length must fit into the model with room for a ``reply``, or lm-eval would cut prompts on the left."""
    beyond = [length for length in lengths if limit is not None and length + reply > limit]
    if beyond:
        kept = f", of which {reply} are kept for the reply" if reply else ""
        raise EvalError(f"max_seq_lengths={beyond[0]}: the model ends at {limit} positions{kept}; choose no more")

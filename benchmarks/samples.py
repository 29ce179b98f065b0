"""The fixed, seeded samples on which formats are judged: hidden numbers, digits to copy, running text.

A sample is a context that is quantized, and one or more probes that are then fed against it: token ids whose last few
are scored. Everything is a function of the tokenizer and the seed.

Decisions:
- Contexts have 4 + 512 or 4 + 1,024 tokens: behind 4 exact sinks all of it can be closed into blocks of 64, and a
  format without a window is judged without one.
- Seed 0 reads the second half of each novel, every other seed the first half: what was chosen on a development seed
  is judged on text that it has not seen.
- needle: four things, each with a number of 7 digits, hidden at sentence ends; the question ends in the beginning of
  its answer, since small models then complete it instead of chatting.
- copy: groups of random digits, to be repeated from the first one on. A digit can only be known by finding its place.
- text: what a novel says next. The first token of the continuation is fed, not scored: its prediction comes from the
  prefill, where every cache is exact.
"""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

from hf_kvquant.prompt import SENTENCE_END, THINGS, data_path, frame

VERSION = 1  # raise it with every change of the samples: stored results are then measured anew
NOVELS = ("persuasion", "northanger_abbey")
SINKS = 4
LENGTHS = (512 + SINKS, 1024 + SINKS)
SETS = ("needle", "copy", "text")
DIGITS = 7
SCORED_COPY, SCORED_TEXT = 64, 128
REPORT_SEED = 0


@dataclass(frozen=True)
class Probe:
    """Token ids fed after the context; the last ``scored`` of them are judged."""

    ids: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Sample:
    name: str
    kind: str
    context: tuple[int, ...]
    probes: tuple[Probe, ...]


def build_samples(tokenizer: Any, seed: int, quick: bool = False) -> list[Sample]:
    """All samples of a seed, in a fixed order; ``quick``: the first short one of each set."""
    lengths, each = (LENGTHS[:1], 1) if quick else (LENGTHS, 4)
    builders = {"needle": needle, "copy": copy, "text": text}
    return [
        builders[name](tokenizer, f"{name}-{length}-{number}", length, NOVELS[number % 2], seed)
        for name in SETS
        for length in (lengths if name != "copy" else lengths[:1])
        for number in range(each)
    ]


def needle(tokenizer: Any, name: str, length: int, novel: str, seed: int) -> Sample:
    rng = random.Random(f"{name} {seed}")
    things = rng.sample(THINGS, 4)
    numbers = [f"{rng.randrange(10**DIGITS):0{DIGITS}d}" for _ in things]
    frames = [frame(tokenizer, _ask(thing), _fact(thing)) for thing in things]
    hidden = [_ids(tokenizer, f" {_fact(thing)} {number}.") for thing, number in zip(things, numbers, strict=True)]
    before = _ids(tokenizer, frames[0][0])
    room = length - len(before) - sum(map(len, hidden))
    context = before + hide(_prose(tokenizer, rng, novel, seed, room), hidden, rng)
    probes = [
        Probe((*_ids(tokenizer, after + " "), *_ids(tokenizer, number)), DIGITS)
        for (_, after), number in zip(frames, numbers, strict=True)
    ]
    return Sample(name, "needle", tuple(context), tuple(probes))


def _ask(thing: str) -> str:
    return f"What is the secret number of the {thing}?"


def _fact(thing: str) -> str:
    return f"The secret number of the {thing} is:"


def hide(sentences: list[list[int]], hidden: list[list[int]], rng: random.Random) -> list[int]:
    """The hidden sentences between those of the text, one in each equal part of it."""
    ends = [0, *accumulate(map(len, sentences))]
    wanted = [(part + rng.random()) / len(hidden) * ends[-1] for part in range(len(hidden))]
    places = [min(range(len(sentences)), key=lambda i, w=place: abs(ends[i] - w)) for place in wanted]
    out: list[int] = []
    for index, sentence in enumerate(sentences):
        for place, each in zip(places, hidden, strict=True):
            out += each if place == index else []
        out += sentence
    return out


def copy(tokenizer: Any, name: str, length: int, novel: str, seed: int) -> Sample:
    del novel
    rng = random.Random(f"{name} {seed}")
    before, after = frame(tokenizer, "Repeat these numbers.", "")
    start = _ids(tokenizer, before + "Numbers:")
    groups = _ids(tokenizer, "".join(f" {rng.randrange(10**4):04d}" for _ in range(length // 4)))
    ids = (*_ids(tokenizer, after + "Numbers:"), *groups[:SCORED_COPY])
    return Sample(name, "copy", tuple(start + groups)[:length], (Probe(ids, SCORED_COPY),))


def text(tokenizer: Any, name: str, length: int, novel: str, seed: int) -> Sample:
    rng = random.Random(f"{name} {seed}")
    ids = list(chain.from_iterable(_prose(tokenizer, rng, novel, seed, length + 1 + SCORED_TEXT)))
    return Sample(name, "text", tuple(ids[:length]), (Probe(tuple(ids[length:]), SCORED_TEXT),))


def _prose(tokenizer: Any, rng: random.Random, novel: str, seed: int, tokens: int) -> list[list[int]]:
    """Exactly ``tokens`` ids of a novel, sentence by sentence, from the start of one on; the last is cut short."""
    words = gzip.decompress(data_path(f"{novel}.txt.gz").read_bytes()).decode("utf-8").split()
    half = len(words) // 2
    first = rng.randrange(half - 2 * tokens) + (half if seed == REPORT_SEED else 0)
    passage = " ".join(words[first : first + 2 * tokens])
    ends = [match.end() for match in SENTENCE_END.finditer(passage)]
    sentences, room = [], tokens
    for start, end in pairwise(ends):
        ids = _ids(tokenizer, " " + passage[start:end].rstrip())[:room]
        sentences.append(ids)
        room -= len(ids)
        if not room:
            return sentences
    raise ValueError(f"{novel}: no {tokens} tokens from word {first} on; ask for fewer")


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)

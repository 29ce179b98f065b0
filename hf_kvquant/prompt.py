"""The demo's prompt: one fact hidden in a passage of a real novel, and the question about it.

Decisions: the fact is a 7-digit code, several tokens that must all be right, and nothing that can be guessed. The
question ends in the beginning of its answer: small models then complete it instead of chatting.
"""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THINGS = ("blue lantern", "old bridge", "silver clock", "north gate", "walnut desk", "garden house")
SENTENCE_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"']? ")


class DemoError(ValueError):
    """The demo was asked for something it cannot do; the message is one line for the user."""


def check(fine: bool, message: str) -> None:
    if not fine:
        raise DemoError(message)


@dataclass(frozen=True)
class Prompt:
    """Token ids that are read first, token ids that are asked afterwards, the hidden sentence and the code in it."""

    haystack: list[int]
    question: list[int]
    fact: str
    answer: str

    def __len__(self) -> int:
        return len(self.haystack) + len(self.question)


def data_path(name: str) -> Path:
    """A file of ``eval/data``: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "_data" / name
    return installed if installed.exists() else package.parent / "eval" / "data" / name


def build_prompt(tokenizer: Any, tokens: int, seed: int) -> Prompt:
    """At most ``tokens`` ids, question included: a passage with one fact in it; the same for the same seed."""
    rng = random.Random(f"demo {seed}")
    thing, code, start, depth = rng.choice(THINGS), f"{rng.randrange(10**7):07d}", rng.random(), rng.uniform(0.1, 0.6)
    fact = f"The secret code of the {thing} is: {code}."
    before, after = frame(tokenizer, f"What is the secret code of the {thing}?", f"The secret code of the {thing} is:")
    question = tokenizer(after, add_special_tokens=False).input_ids
    words = _words(start)

    def haystack(count: int) -> list[int]:
        text = before + _hide(" ".join(words[:count]), fact, depth)
        return tokenizer(text, add_special_tokens=not before).input_ids

    count = largest(min(tokens, len(words)), lambda n: len(haystack(n)) + len(question) <= tokens)
    check(0 < count < len(words), f"--tokens {tokens}: the demo's text fills no such prompt; choose another number")
    return Prompt(haystack(count), question, fact, code)


def _words(start: float) -> list[str]:
    """Persuasion as words, from a given fraction of it on, then around to that place again."""
    words = gzip.decompress(data_path("persuasion.txt.gz").read_bytes()).decode("utf-8").split()
    first = int(start * len(words))
    return words[first:] + words[:first]


def _hide(text: str, fact: str, depth: float) -> str:
    end = SENTENCE_END.search(text, int(depth * len(text)))
    cut = end.end() if end else 0
    return f"{text[:cut]}{fact} {text[cut:]}"


def frame(tokenizer: Any, ask: str, start: str) -> tuple[str, str]:
    """What goes before and after the passage: the chat template where there is one, else nothing but the question."""
    if not getattr(tokenizer, "chat_template", None):
        return "", f"\n\n{ask}\n{start}"
    mark = "PASSAGE"
    messages = [{"role": "user", "content": f"{mark}\n\n{ask}"}]
    before, after = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(mark)
    return before, after + start


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest count up to ``limit`` that fits, by bisection; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

"""The kinds of long-context tasks; README.md beside this file says what each is after and which YAML asks for it.

To add one: a function that drafts a sample, a line in ``KINDS``, a YAML that names it, and a paragraph in README.md.
"""

from __future__ import annotations

import random
from typing import Any

from hf_kvquant.eval_register import register
from hf_kvquant.longctx import Ask, Draft, Kind, hide, insert_at, prose_haystack
from hf_kvquant.longctx_task import documents

register()  # plain lm-eval loads this file before it looks for the model type

COLOURS = "amber black blue brown crimson golden green grey orange purple red silver violet white yellow".split()
OBJECTS = "barrel basket bridge candle carriage chest clock door garden gate kettle lantern mirror piano table".split()
PEOPLE = "Agnes Bertram Clara Dorothy Edwin Felix Grace Hugo Isabel Jasper Lydia Martin Nora Oscar Ruth Simon".split()
PLACES = "barn boathouse brewery chapel cottage dairy forge granary harbour inn library mill orchard stable".split()
STILL_LIFE = (
    "The road is long and dry.",
    "The hedge stands beside it.",
    "A cart goes by and is gone.",
    "The sky is wide and pale.",
    "Nobody says a word.",
)
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
PARTS = 4  # needles of the tasks that hide several
HOPS = 3
COPIED, LEADING = 8, 2  # groups that are asked for, and groups before them that the answer begins with


def around(depth: float, parts: int = PARTS) -> list[float]:
    """``parts`` depths at equal distances round the haystack, one of them ``depth``, from the first on."""
    return sorted([depth, *((depth + part / parts) % 1 for part in range(1, parts))])


def numbers(rng: random.Random, count: int, digits: int = 7) -> list[str]:
    return [str(number) for number in rng.sample(range(10 ** (digits - 1), 10**digits), count)]


def things(rng: random.Random, count: int) -> list[str]:
    """Different objects of different colours."""
    pairs = zip(rng.sample(COLOURS, count), rng.sample(OBJECTS, count), strict=True)
    return [" ".join(pair) for pair in pairs]


def names(rng: random.Random, count: int) -> list[str]:
    """Different words that mean nothing."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(SYLLABLES, k=3))] = None
    return list(found)


def number_of(thing: str) -> str:
    return f"The secret number of the {thing} is:"


def ask_number(thing: str, number: str) -> Ask:
    return Ask(f"What is the secret number of the {thing}?", number_of(thing), (number,))


def passkey(rng: random.Random, depth: float, tokens: int) -> Draft:
    (key,) = numbers(rng, 1, digits=5)
    needle = f"The pass key is {key}, remember it."

    def haystack(units: int) -> str:
        noise = [STILL_LIFE[unit % len(STILL_LIFE)] for unit in range(units)]
        return " ".join(insert_at(noise, depth, needle))

    return Draft(haystack, 8, tokens, Ask("What is the pass key?", "The pass key is", (key,)))


def single(rng: random.Random, depth: float, tokens: int) -> Draft:
    (thing,), (number,) = things(rng, 1), numbers(rng, 1)
    haystack = prose_haystack(rng.random(), [(depth, f"{number_of(thing)} {number}.")])
    return Draft(haystack, 16, tokens, ask_number(thing, number))


def multikey(rng: random.Random, depth: float, tokens: int) -> Draft:
    hidden = list(zip(around(depth), things(rng, PARTS), numbers(rng, PARTS), strict=True))
    needles = [(place, f"{number_of(thing)} {number}.") for place, thing, number in hidden]
    asks = {place: ask_number(thing, number) for place, thing, number in hidden}
    asked = min(asks, key=lambda place: abs(place - depth))
    return Draft(prose_haystack(rng.random(), needles), 32, tokens, asks[asked], tuple(asks.values()))


def multivalue(rng: random.Random, depth: float, tokens: int) -> Draft:
    (thing,), values = things(rng, 1), numbers(rng, PARTS)
    needles = [
        (place, f"One secret number of the {thing} is: {value}.")
        for place, value in zip(around(depth), values, strict=True)
    ]
    question = f"Which {PARTS} secret numbers does the {thing} have, in the order of the text?"
    ask = Ask(question, f"The secret numbers of the {thing} are:", tuple(values))
    return Draft(prose_haystack(rng.random(), needles), 32, tokens, ask)


def multiquery(rng: random.Random, depth: float, tokens: int) -> Draft:
    wanted, values = things(rng, PARTS), numbers(rng, PARTS)
    needles = [
        (place, f"{number_of(thing)} {value}.")
        for place, thing, value in zip(around(depth), wanted, values, strict=True)
    ]
    listed = ", ".join(f"the {thing}" for thing in wanted)
    ask = Ask(f"What are the secret numbers of {listed}?", f"The secret numbers of {listed} are:", tuple(values))
    return Draft(prose_haystack(rng.random(), needles), 32, tokens, ask)


def lines(rng: random.Random, depth: float, tokens: int) -> Draft:
    keys, values = names(rng, tokens // 8 + 2), numbers(rng, tokens // 8 + 2)
    rows = [f"The number of {key} is: {value}." for key, value in zip(keys, values, strict=True)]
    ask = Ask(f"What is the number of {keys[0]}?", f"The number of {keys[0]} is:", (values[0],))
    return Draft(lambda units: "\n".join(insert_at(rows[1 : units + 1], depth, rows[0])), 3, len(rows) - 1, ask)


def key_value(rng: random.Random, depth: float, tokens: int) -> Draft:
    count = tokens // 8 + 2
    codes = [f"{code:08x}" for code in rng.sample(range(16**7, 16**8), 2 * count)]
    pairs = [f'"{key}": "{value}"' for key, value in zip(codes[:count], codes[count:], strict=True)]
    ask = Ask(f'What is the value of the key "{codes[0]}"?', f'"{codes[0]}":', (f'"{codes[count]}"',))

    def haystack(units: int) -> str:
        return "{" + ",\n".join(insert_at(pairs[1 : units + 1], depth, pairs[0])) + "}"

    return Draft(haystack, 3, count - 1, ask)


def variables(rng: random.Random, depth: float, tokens: int) -> Draft:
    chains = names(rng, 2 * HOPS)
    values = numbers(rng, 2, digits=5)
    needles = []
    for value, chain in zip(values, (chains[:HOPS], chains[HOPS:]), strict=True):
        for hop, name in enumerate(chain):
            place = depth + (1 - depth) * hop / HOPS
            needles.append((place, f"VAR {name} = {chain[hop - 1] if hop else value};"))

    def haystack(units: int) -> str:
        return hide(" ".join(STILL_LIFE[unit % len(STILL_LIFE)] for unit in range(units)), needles)

    question = f"Which variables hold the value {values[0]}, at first or second hand?"
    ask = Ask(question, f"The variables that hold {values[0]} are:", tuple(f"VAR {name}" for name in chains[:HOPS]))
    return Draft(haystack, 12, tokens, ask)


def copy(rng: random.Random, depth: float, tokens: int) -> Draft:
    run = COPIED + LEADING
    groups = numbers(rng, min(run + tokens // 2, 9000), digits=4)
    asked, others = groups[:run], groups[run:]
    while len(others) < tokens // 2:  # more than there are different ones: only those that are asked for stand once
        others += rng.sample(groups[run:], len(groups) - run)
    told = " ".join(asked[:LEADING])
    ask = Ask(f"Repeat these numbers from {asked[0]} on.", f"Numbers: {told}", tuple(asked[LEADING:]), separator=" ")

    def haystack(units: int) -> str:
        return "Numbers: " + " ".join(insert_at(others[:units], depth, " ".join(asked)))

    return Draft(haystack, 8, len(others), ask)


def multihop(rng: random.Random, depth: float, tokens: int) -> Draft:
    people, places, values = rng.sample(PEOPLE, PARTS), rng.sample(PLACES, PARTS), numbers(rng, PARTS)
    depths = around(depth)
    hidden, asks = [], {}
    for at, person, place, value in zip(depths, people, places, values, strict=True):
        hidden.append((at, f"The secret number of the {place} is: {value}."))
        hidden.append(((at + 1 / (2 * PARTS)) % 1, f"{person} left a trunk in the {place}."))
        question = f"What is the secret number of the place where {person} left a trunk?"
        asks[at] = Ask(question, f"{person} left a trunk in a place whose secret number is:", (value,))
    asked = min(asks, key=lambda at: abs(at - depth))
    return Draft(prose_haystack(rng.random(), hidden), 40, tokens, asks[asked], tuple(asks.values()))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kvq_passkey", passkey),
        Kind("kvq_niah_single", single),
        Kind("kvq_niah_multikey", multikey, shared=PARTS),
        Kind("kvq_niah_lines", lines),
        Kind("kvq_kv_json", key_value),
        Kind("kvq_niah_multivalue", multivalue),
        Kind("kvq_niah_multiquery", multiquery),
        Kind("kvq_variables", variables),
        Kind("kvq_copy", copy),
        Kind("kvq_multihop", multihop, shared=PARTS),
    )
}


def kvq_passkey(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_passkey"], **settings)


def kvq_niah_single(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_niah_single"], **settings)


def kvq_niah_multikey(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_niah_multikey"], **settings)


def kvq_niah_lines(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_niah_lines"], **settings)


def kvq_kv_json(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_kv_json"], **settings)


def kvq_niah_multivalue(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_niah_multivalue"], **settings)


def kvq_niah_multiquery(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_niah_multiquery"], **settings)


def kvq_variables(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_variables"], **settings)


def kvq_copy(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_copy"], **settings)


def kvq_multihop(**settings: Any) -> dict[str, Any]:
    return documents(KINDS["kvq_multihop"], **settings)

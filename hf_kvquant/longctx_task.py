"""What lm-eval needs of the long-context tasks: their documents, their requests, their metrics.

Decision: every document is both generated (exact match, recall, token accuracy) and scored (answer negative
log-likelihood), which lm-eval's YAML alone cannot say. Exact match of a few answers is noisy; the likelihood of the
same answers tells schemes apart with far fewer. Both requests share one prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from hf_kvquant.longctx import (
    DELIMITER,
    Counter,
    Grid,
    Kind,
    check_lengths,
    draw,
    load_tokenizer,
    model_length,
    novel,
    sample_rng,
)
from hf_kvquant.prompt import largest
from hf_kvquant.schemes import EvalError

METRICS = {"exact_match": True, "recall": True, "token_accuracy": True, "answer_nll": False}  # higher is better
BY_CELL = ("recall", "answer_nll")
REPLY_TOKENS = 44  # the largest max_gen_toks of the tasks


def documents(
    kind: Kind,
    max_seq_lengths: Any = Grid.lengths,
    depths: Any = Grid.depths,
    samples_per_cell: Any = Grid.samples,
    data_seed: Any = Grid.seed,
    chat_template: bool = False,
    **settings: Any,
) -> dict[str, Dataset]:
    """The test split of a task, from ``--metadata`` and the model arguments, which lm-eval hands over as well.

    Raises:
        EvalError: bad values, no tokenizer, a length too short for the task or beyond the model.
    """
    grid = Grid.of(max_seq_lengths, depths, samples_per_cell, data_seed)
    check_lengths(grid.lengths, _limit(settings), REPLY_TOKENS)
    tokenizer = load_tokenizer(tokenizer_name(settings))
    if chat_template and not getattr(tokenizer, "chat_template", None):
        raise EvalError(f"chat template: the tokenizer {tokenizer_name(settings)} has none; leave it out")
    counter = Counter(tokenizer, bool(chat_template))
    return {"test": Dataset.from_list(draw(kind, grid, counter))}


def passages(
    name: str,
    max_seq_lengths: Any = Grid.lengths,
    samples_per_cell: Any = Grid.samples,
    data_seed: Any = Grid.seed,
    **settings: Any,
) -> dict[str, Dataset]:
    """The test split of a perplexity task: passages of the novel, as many words as each length in tokens holds."""
    grid = Grid.of(max_seq_lengths, (0.0,), samples_per_cell, data_seed)
    check_lengths(grid.lengths, _limit(settings))
    tokenizer = load_tokenizer(tokenizer_name(settings))

    def passage(length: int, index: int) -> dict[str, Any]:
        place = sample_rng(grid.seed, name, length, index).random()

        def tokens(words: int) -> int:
            return len(tokenizer(" ".join(novel(place, words)), add_special_tokens=False).input_ids)

        words = largest(length, lambda count: tokens(count) < length)  # the first token stands after a prefix token
        text = " ".join(novel(place, words))
        return {"task": name, "length": length, "index": index, "text": text, "tokens": tokens(words)}

    return {"test": Dataset.from_list([passage(length, index) for length, _, index in grid.cells()])}


def score_passage(document: dict[str, Any], results: Sequence[float]) -> dict[str, Any]:
    """Perplexity per token, its logarithm (``nll``), and bits per byte of a passage."""
    (likelihood,) = results
    nll = -likelihood / document["tokens"]
    nbytes = len(document["text"].encode("utf-8"))
    return {"perplexity": -nll, "nll": nll, "bits_per_byte": -likelihood / nbytes / math.log(2)}


def tokenizer_name(settings: dict[str, Any]) -> str:
    """The tokenizer that prompts are measured with: ``tokenizer``, else that of ``pretrained``."""
    name = settings.get("tokenizer") or settings.get("pretrained")
    if not isinstance(name, str):
        raise EvalError(
            f"tokenizer={name!r}: prompts are measured with one; name it, --model_args pretrained=NAME or --metadata "
            "tokenizer=NAME"
        )
    return name


def _limit(settings: dict[str, Any]) -> int | None:
    """Positions that a prompt may take: the model's, or fewer if ``max_length`` says so."""
    given, name = settings.get("max_length"), settings.get("pretrained")
    limits = [given if isinstance(given, int) else None, model_length(name) if isinstance(name, str) else None]
    return min((limit for limit in limits if limit is not None), default=None)


class LongContextTask(ConfigurableTask):
    """A task whose documents are generated and scored; see :func:`score_answer` for the metrics."""

    def __init__(self, config: dict[str, Any]) -> None:
        # With this field lm-eval takes names of metrics as they are; without it, it would look for them on the hub.
        own = {key: value for key, value in config.items() if key != "class"} | {"process_results": score_answer}
        super().__init__(config=own)
        self.cells: list[str] = []
        self.read_tokens = load_tokenizer(tokenizer_name(self.config.metadata or {}))

    def build_all_requests(
        self,
        *,
        limit: int | None = None,
        samples: list[int] | None = None,
        cache_requests: bool = False,
        **options: Any,
    ) -> None:
        """lm-eval's, but for its request cache: its key knows neither lengths nor seed, so it would hand out the
        prompts of another grid. Notes the cells that this run has, those of other processes included."""
        if cache_requests:
            raise EvalError(
                f"cache_requests: {self.config.task} depends on --metadata, which that cache does not know; leave it "
                "out"
            )
        reply = max((self.config.generation_kwargs or {}).get("max_gen_toks", 0), REPLY_TOKENS)
        check_lengths(self.dataset["test"]["length"], _limit(self.config.metadata or {}), reply)
        super().build_all_requests(limit=limit, samples=samples, cache_requests=False, **options)
        chosen = self.dataset["test"].select(samples if samples else range(len(self.dataset["test"]))[:limit])
        cells = zip(chosen["length"], chosen["depth"], strict=True)
        self.cells = [cell_name(*cell) for cell in dict.fromkeys(cells)]

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        metadata = kwargs["metadata"]
        generated = dict(self.config.generation_kwargs or {})
        return [
            Instance("generate_until", doc, (ctx, generated), 0, metadata),
            Instance("loglikelihood", doc, (ctx, DELIMITER + doc["target"]), 1, metadata),
        ]

    def process_results(self, doc: dict[str, Any], results: Any) -> dict[str, Any]:
        """The four metrics, and two of them once more under the name of the document's cell; None in other cells, since
        every process must report the same names."""
        reply, (likelihood, _) = results
        scores = score_answer(doc, reply, likelihood, lambda text: self.read_tokens(text, add_special_tokens=False))
        own = cell_name(doc["length"], doc["depth"])
        by_cell = {f"{name}_{cell}": scores[name] if cell == own else None for cell in self.cells for name in BY_CELL}
        return scores | by_cell

    def aggregation(self) -> dict[str, Callable[..., Any]]:
        return super().aggregation() | {f"{name}_{cell}": mean_of_cell for cell in self.cells for name in BY_CELL}

    def higher_is_better(self) -> dict[str, bool]:
        return super().higher_is_better() | {f"{name}_{cell}": METRICS[name] for cell in self.cells for name in BY_CELL}


def cell_name(length: int, depth: float) -> str:
    """Name of a cell of the grid, depth in percent: "512_d12.5"."""
    return f"{length}_d{100 * depth:g}"


def mean_of_cell(values: Sequence[float | None]) -> float:
    """Mean over the documents of a cell; NaN where the run had none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else math.nan


def score_answer(
    doc: dict[str, Any], reply: str, likelihood: float, tokenize: Callable[[str], Any]
) -> dict[str, float]:
    """Metrics of one document.

    ``exact_match``: the reply begins with the whole target. ``recall``: share of the answers that occur in it.
    ``token_accuracy``: share of the target's tokens that the reply has at the same position. ``answer_nll``: negative
    log-likelihood of the target per token, in nats.
    """
    said, target = reply.strip(), doc["target"]
    ends = said.startswith(target) and not said[len(target) : len(target) + 1].isalnum()
    wanted, given = (list(tokenize(DELIMITER + text).input_ids) for text in (target, said))
    right = sum(a == b for a, b in zip(wanted, given, strict=False))
    return {
        "exact_match": float(ends),
        "recall": fmean(float(answer in said) for answer in doc["answers"]),
        "token_accuracy": right / len(wanted),
        "answer_nll": -likelihood / doc["answer_tokens"],
    }

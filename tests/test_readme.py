"""The tables of README and docs are the result files', number by number, and so are the figures in their prose."""

from __future__ import annotations

import itertools
import re

import pytest

from hf_kvquant import PRESETS
from tests.readme_figures import figures
from tests.readme_rows import written
from tests.readme_tables import PRESET_ROWS, ROOT, TABLES, Table

DOCUMENTS = ("README.md", "docs/quality.md", "docs/speed.md", "docs/limits.md")


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.document}: {table.head[2:40]}")
def test_tables_equal_the_result_files(table: Table) -> None:
    text = (ROOT / table.document).read_text()
    assert written(text, table) == text, "python -m tests.readme_rows --write"


@pytest.mark.parametrize(("document", "text"), figures())
def test_figures_in_prose_equal_the_result_files(document: str, text: str) -> None:
    assert text in " ".join((ROOT / document).read_text().split()), (
        "python -m tests.readme_rows prints what it should say"
    )


def test_no_other_table_of_documents_holds_measurements() -> None:
    """A table of numbers that no result file stands behind would be found nowhere else."""
    known = {table.head for table in TABLES}
    for document in DOCUMENTS:
        lines = (ROOT / document).read_text().splitlines()
        heads = [line for line, rule in itertools.pairwise(lines) if rule.startswith("| --- ")]
        for head in set(heads) - known:
            start = lines.index(head)
            rows = [line for line in lines[start + 2 :][: lines[start + 2 :].index("")] if line.startswith("|")]
            assert not re.search(r"\| [+-]?[\d.,]+%? \|", "".join(rows)), head


def test_rows_replace_what_stands_under_their_head() -> None:
    table = Table("", "| a | b |", lambda: ["| 3 | 4 |"])
    text = "before\n| a | b |\n| --- | --- |\n| 1 | 2 |\n| 5 | 6 |\n\nafter\n"
    assert written(text, table) == "before\n| a | b |\n| --- | --- |\n| 3 | 4 |\n\nafter\n"


def test_every_preset_has_its_row() -> None:
    assert set(PRESETS) - {"none"} <= set(PRESET_ROWS)

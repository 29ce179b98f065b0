"""Execute notebooks and save them with their outputs: ``python -m notebooks.run`` for all, ``... 01 05`` for some.

Decisions:
- The kernel is that of the interpreter which runs this, whatever kernelspecs a user has installed, and works in the
  folder of the notebook, as Jupyter does.
- What is saved depends on nothing but the cells: no times of execution, no versions, one piece per output stream. The
  line on stderr that decode attention is being compiled is dropped (without a C++ compiler there is none); anything
  else on stderr is an error, and so is a picture without a title or with an unlabelled axis.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL_SECONDS = 300
COMPILING = "hf-kvquant: compiling decode attention"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
# Run in the kernel before the first cell and after the last; neither is saved.
BEFORE = "from notebooks import pictures as _pictures\n\n_pictures.watch()"
AFTER = "assert not _pictures.faults, _pictures.faults"


class NotebookError(RuntimeError):
    """A notebook ran, but says something on stderr."""


def execute(path: Path) -> Any:
    """A notebook as it is after all its cells have run, cleaned.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed, or a picture lacks a title or labels.
        NotebookError: something was written to stderr.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [nbformat.v4.new_code_cell(BEFORE), *notebook.cells, nbformat.v4.new_code_cell(AFTER)]
    # No kernelspec is looked for in any folder: what is left is the native one, started with sys.executable.
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=CELL_SECONDS,
        startup_timeout=CELL_SECONDS,
        extra_arguments=["--log-level=ERROR"],  # not that the kernel talks over TCP
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env=_environment(), cleanup_kc=True)
    notebook.cells = notebook.cells[1:-1]
    return cleaned(notebook, path.name)


def _environment() -> dict[str, str]:
    """Threads that sleep while they wait (see Makefile), this checkout in front of an installed package, and no advice
    of tqdm to install ipywidgets, without which its bars are text."""
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONWARNINGS": "ignore:IProgress not found"}
    return quiet | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def cleaned(notebook: Any, name: str) -> Any:
    """Without what changes from run to run or from machine to machine."""
    notebook.metadata = nbformat.from_dict(METADATA)
    count = 0
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type != "code":
            continue
        count += 1
        cell.execution_count = count
        cell.outputs = [output for output in cell.outputs if not _only_compiles(output)]
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            if output.get("name") == "stderr":
                raise NotebookError(f"{name}, code cell {count} writes to stderr: {output.text}")
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _small(output.data["image/png"])
    return notebook


def _small(png: str) -> str:
    """A picture in 256 colours, which is plenty for charts and a third of the bytes."""
    image = Image.open(io.BytesIO(base64.b64decode(png)))
    if image.mode == "P":
        return png
    written = io.BytesIO()
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(written, "PNG", optimize=True)
    return base64.b64encode(written.getvalue()).decode()


def _only_compiles(output: Any) -> bool:
    lines = output.get("text", "").splitlines() if output.get("name") == "stderr" else []
    return bool(lines) and all(line.startswith(COMPILING) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m notebooks.run", description="Execute notebooks, keep their outputs."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of file names, such as 01 (default: all)")
    names = tuple(parser.parse_args().names) or ("",)
    for path in (path for path in NOTEBOOKS if path.name.startswith(names)):
        start = time.perf_counter()
        nbformat.write(execute(path), path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()

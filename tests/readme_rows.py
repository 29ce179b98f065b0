"""Every table of measurements in README and docs, and every figure in their prose, computed from the result files.

    python -m tests.readme_rows            # prints them, document by document
    python -m tests.readme_rows --write    # puts the tables into the documents; figures in prose are changed by hand

Decision: a table is found in its document by its head line. ``test_readme.py`` holds the documents to what is computed
here, so a new measurement is this command and a commit.
"""

from __future__ import annotations

import sys

from tests.readme_figures import figures
from tests.readme_tables import ROOT, TABLES, Table


def written(text: str, table: Table) -> str:
    """``text`` with the table's rows in place of those under its head line."""
    lines = text.splitlines()
    start = lines.index(table.head)
    end = next((i for i in range(start, len(lines)) if not lines[i].startswith("|")), len(lines))
    return "\n".join([*lines[:start], table.text(), *lines[end:]]) + "\n"


def main() -> None:
    for table in TABLES:
        print(f"\n{table.document}\n\n{table.text()}")
        if "--write" in sys.argv[1:]:
            path = ROOT / table.document
            path.write_text(written(path.read_text(), table))
    print("\nFigures in prose:\n")
    for document, text in figures():
        print(f"{document}: {text}")


if __name__ == "__main__":
    main()

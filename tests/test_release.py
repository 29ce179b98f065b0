"""What a release consists of agrees with itself: one version, typed, floors that are tested."""

from __future__ import annotations

import re
from pathlib import Path

import hf_kvquant

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()


def test_the_version_stands_in_one_place() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, re.M) == [hf_kvquant.__version__]
    assert 'dynamic = ["version"]' in PROJECT
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == hf_kvquant.__version__  # pyright: ignore[reportOptionalSubscript]


def test_the_citation_says_what_the_project_says() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    for field, written in (("title", "name"), ("abstract", "description"), ("license", "license")):
        (given,) = re.findall(rf"^{field}: (.*)$", citation, re.M)
        assert f'{written} = "{given.rstrip(".")}"' in PROJECT


def test_the_package_is_typed() -> None:
    assert (ROOT / "hf_kvquant" / "py.typed").is_file()


def test_floor_and_pin_are_what_is_tested() -> None:
    (floor,) = re.findall(r'"transformers>=([\d.]+),<6"', PROJECT)
    oldest = (ROOT / "constraints-oldest.txt").read_text()
    assert re.search(rf"^transformers=={floor}\.0$", oldest, re.M)
    (pin,) = re.findall(r"^transformers==([\d.]+);", (ROOT / "constraints.txt").read_text(), re.M)
    assert f"Transformers {floor}.0 and {pin} are tested" in (ROOT / "README.md").read_text()

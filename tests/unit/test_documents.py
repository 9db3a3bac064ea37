"""docs/: every statement of SEMANTICS.md has a test that carries its example; links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tierfs.points import POINTS
from tierfs.policy.describe import remarks
from tierfs.policy.load import parse_policy

ROOT = Path(__file__).parents[2]
SEMANTICS = ROOT / "docs" / "SEMANTICS.md"
DURABILITY = ROOT / "docs" / "DURABILITY.md"
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
NAMED = re.compile(r"\[`(test_\w+)`\]")
UNPROVEN = ("", "Not yet")
"""Sections that state nothing which must have a test: the introduction and what is not there."""


def statements(text: str) -> list[tuple[str, str]]:
    """(section, paragraph or list item), headings left out."""
    found: list[tuple[str, str]] = []
    section = ""
    for block in re.split(r"\n\s*\n|\n(?=[-*] |\d+\. |#)", text):
        block = block.strip()
        if block.startswith("#"):
            heading, _, block = block.partition("\n")
            section = "" if heading.startswith("# ") else heading.lstrip("# ")
        if block.strip():
            found.append((section, block.strip()))
    return found


def test_functions() -> dict[str, Path]:
    """Every test function of the suite, from its source; also the contracts of tests/unit/test_conformance.py."""
    return {
        node.name: path
        for path in (*(ROOT / "tests").rglob("test_*.py"), ROOT / "tierfs" / "testing" / "conformance.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


test_functions.__test__ = False  # type: ignore[attr-defined]


def unproven(text: str, known: dict[str, Path]) -> list[str]:
    """What is wrong with a document of statements."""
    problems = []
    for section, statement in statements(text):
        names = NAMED.findall(statement)
        if section not in UNPROVEN and not names:
            problems.append(f"no test: {statement}")
        problems += [f"no such test: {name}" for name in names if name not in known]
    return problems


def test_every_statement_has_a_test_that_exists() -> None:
    assert unproven(SEMANTICS.read_text(encoding="utf-8"), test_functions()) == []


def test_the_check_itself_notices() -> None:
    text = "# T\nintro\n\n## Promises\n\n1. One [`test_a`]\n2. Two\n   on two\n\nX [`test_b`]\n\n## Not yet\n- x\n"
    assert unproven(text, {"test_a": Path()}) == ["no test: 2. Two\n   on two", "no such test: test_b"]


def test_semantics_open_with_the_nine_promises() -> None:
    promises = [text for section, text in statements(SEMANTICS.read_text(encoding="utf-8")) if section == "Promises"]
    assert [text.split(" ")[0] for text in promises] == [f"{n}." for n in range(1, 10)]


def test_every_point_at_which_tests_kill_is_documented_and_every_documented_one_exists() -> None:
    named = re.findall(r"`([A-Z]+_[A-Z_]+)`", DURABILITY.read_text(encoding="utf-8"))
    assert {name for name in named if not name.startswith("O_")} == {point.name for point in POINTS}


def test_every_window_that_is_no_power_cut_names_its_point() -> None:
    lines = DURABILITY.read_text(encoding="utf-8").splitlines()
    tables = [line.split("|")[1:-1] for line in lines if line.startswith("|")]
    windows = [cells for cells in tables if len(cells) == 3]
    assert len(windows) > 40
    assert [cells for cells in windows if not cells[2].strip() and "power cut" not in cells[0]] == []
    assert [cells for cells in tables if len(cells) == 2 and cells[0].strip().startswith("crash")] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    missing = [target for target in links if not (document.parent / target).exists()]
    named = re.findall(r"`((?:tierfs|tests|docs|tools|mount|policies)/[\w/@.-]+)`", text)
    missing += [name for name in named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()]
    assert missing == []


def test_the_policy_of_the_readme_is_valid_and_unremarkable() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert remarks(parse_policy(text, "ckpt.yaml")) == [], "what newcomers copy should be what they want"
    assert len(text.splitlines()) <= 10


def test_the_readme_links_every_document() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in (ROOT / "docs").glob("*.md") if f"docs/{path.name}" not in readme] == []

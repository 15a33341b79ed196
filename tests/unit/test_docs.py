"""Documents name only what is there: links, modules, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.campaign import names

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
A_REQUEST = ROOT / "docs" / "a-request.md"

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_MODULE = re.compile(r"((?:[\w-]+/)*[\w-]+\.py)(?:: ([\w.]+))?")
_FOLDERS = {"core/": "cache/torchtpu_cache_core/", "server/": "server/torchtpu_cache_server/"}
_BESIDE = "client/torchtpu_cache/"


def modules_of(text: str) -> list[tuple[str, str | None]]:
    """Every `path/like.py` in backticks, and the name behind it in `path/like.py: Name.method`."""
    found = (_MODULE.fullmatch(code) for code in _CODE.findall(text))
    return [(match[1], match[2]) for match in found if match]


def documents(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


@pytest.mark.parametrize("document", documents(DOCUMENTS))
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = [link for link in _LINK.findall(document.read_text()) if not re.match(r"[a-z]+:", link)]
    broken = []
    for link in links:
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (heading and heading not in _anchors(target)):
            broken.append(link)
    assert not broken


def _anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", documents([path for path in DOCUMENTS if path != A_REQUEST]))
def test_modules_in_documents_are_there(document: Path) -> None:
    """By the end of their path: the text around a name says below which folder it stands."""
    there = [
        "/" + str(path.relative_to(ROOT))
        for root in ("cache", "client", "server", "tests", "scripts", "examples")
        for path in (ROOT / root).rglob("*.py")
    ]
    named = [module for module, _ in modules_of(document.read_text())]
    assert [module for module in named if not any(path.endswith("/" + module) for path in there)] == []


def test_the_walk_through_the_code_names_what_is_there() -> None:
    named = modules_of(A_REQUEST.read_text())
    assert len(named) > 20
    wrong = []
    for module, name in named:
        folder = next((folder for folder in _FOLDERS if module.startswith(folder)), "")
        path = ROOT / _FOLDERS.get(folder, _BESIDE) / module.removeprefix(folder)
        text = path.read_text() if path.is_file() else ""
        parts = [] if name is None else name.split(".")
        if not text or not all(re.search(rf"^ *(async )?(def|class) {part}\b", text, re.MULTILINE) for part in parts):
            wrong.append((module, name))
    assert not wrong


@pytest.mark.parametrize(
    ("package", "document"), [("drills", "reliability.md"), ("bench", "benchmarks.md")], ids=["drills", "bench"]
)
def test_every_drill_and_benchmark_has_its_section_and_its_table(package: str, document: str) -> None:
    text = (ROOT / "docs" / document).read_text()
    sections = {part.partition("\n")[0]: part for part in text.split("\n### ")[1:]}
    assert sorted(sections) == names(package)
    for name, section in sections.items():
        described, place, _ = section.partition(f"<!-- figures of {name} -->\n| figure |")
        assert place, f"{name} has no place for its figures"
        assert len(described) > 100, f"{name} is not described"
        assert section.count("<!-- end -->") == 1


def test_documents_are_all_linked_from_the_readme() -> None:
    links = {(ROOT / link).resolve() for link in _LINK.findall((ROOT / "README.md").read_text())}
    assert [path.name for path in (ROOT / "docs").glob("*.md") if path not in links] == []


@pytest.mark.parametrize("document", documents(DOCUMENTS))
def test_documents_named_in_the_text_are_there(document: Path) -> None:
    named = re.findall(r"\bdocs/[\w/.-]+\.md\b", document.read_text())
    assert [name for name in named if not (ROOT / name).is_file()] == []

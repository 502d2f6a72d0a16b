"""Pages of documentation: links resolve, every page is linked, named files, make targets and flags exist, and tables are current."""

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

import facts
import generate
from bertserve.service.settings import Settings
from support import ROOT

PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "examples/README")]
PAGES += sorted(page for folder in ("models", "docs", "bench") for page in ROOT.glob(f"{folder}/**/*.md"))
# measurement results can name files and flags that no longer exist
CURRENT = [page for page in PAGES if page.parent != ROOT / "bench/results"]
# flags of other programs on the pages
OTHERS = {"--base", "--build-arg", "--cap-drop", "--no-deps", "--read-only", "--rm", "--security-opt", "--tmpfs"}
OTHERS |= {"--build", "--from-file", "--home-dir", "--now", "--scale", "--shell", "--stop-timeout", "--system"}
OTHERS |= {"--address", "--dashboard-host", "--generate", "--gpus", "--head", "--node-ip-address"}
OTHERS |= {"--config", "--storage", "--web"}  # flags of Prometheus

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
each_current_page = pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub generates them."""
    names: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.add(next(name for i in count() if (name := f"{slug}-{i}" if i else slug) not in names))
    return names


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yields the file and the anchor of each link of a page to a file of the project."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("http:", "https:")):
            name, _, anchor = target.partition("#")
            yield (page.parent / name).resolve() if name else page, anchor


@each_page
def test_links_resolve(page: Path) -> None:
    invalid = [(str(target), anchor) for target, anchor in links(page) if not target.exists() or (anchor and anchor not in anchors(target))]

    assert invalid == []


def test_every_page_is_linked() -> None:
    targets = {target for index in (ROOT / "README.md", ROOT / "docs/README.md") for target, _ in links(index)}

    assert set(ROOT.glob("docs/**/*.md")) - targets == set()


@each_current_page
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = re.findall(r"`((?:service|export|bench|models|docs|tests|deploy)/[\w./-]*)`", text) + re.findall(r"\bdocs/[\w/-]+\.\w+", text)

    assert [name for name in names if not (ROOT / name).exists() and not (page.parent / name).exists()] == []


@each_current_page
def test_named_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    text = page.read_text(encoding="utf-8")
    names_ = [*re.findall(r"`make ([a-z0-9-]+)", text), *re.findall(r"^make ([a-z0-9-]+)", text, re.MULTILINE)]

    assert [target for target in names_ if target not in targets] == []


@each_current_page
def test_named_flags_exist(page: Path) -> None:
    options = {f"--{name.replace('_', '-')}" for name in Settings.model_fields} | OTHERS
    options |= {f"--no-{name.replace('_', '-')}" for name, field in facts.settings().items() if field.annotation is bool}
    options |= {f"--{name.replace('_', '-')}" for name in facts.score_settings()}
    options |= {flag for parser in facts.parsers().values() for argument in parser.arguments for flag in argument.option_strings}

    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*\w", page.read_text(encoding="utf-8"))) - options == set()


@each_current_page
def test_named_commands_exist(page: Path) -> None:
    options = {*facts.parsers(), *(f"bert-serve {name}" for name in facts.service_commands())}
    names_ = re.findall(r"(?:`|^|/|&& )(bert-(?:bench|serve) [a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE)

    assert set(names_) - options == set()


@pytest.fixture(name="rendered", scope="module")
def rendered_pages() -> dict[Path, str]:
    return generate.render(generate.generated_pages())


@pytest.mark.parametrize("page", generate.generated_pages(), ids=lambda page: page.name)
def test_generated_tables_and_examples_are_current(rendered: dict[Path, str], page: Path) -> None:
    """`make docs` would not change the page, except that other CPUs give slightly different scores."""
    text, expected = page.read_text(encoding="utf-8"), rendered[page]

    assert generate.NUMBER.sub("", text) == generate.NUMBER.sub("", expected)
    assert list(map(float, generate.NUMBER.findall(text))) == pytest.approx(list(map(float, generate.NUMBER.findall(expected))), abs=0.02)


def test_every_generated_table_is_on_exactly_one_page() -> None:
    names_ = [name for text in generate.generated_pages().values() for name in re.findall(r"<!-- generated by `make docs`: (.+) -->", text)]

    assert sorted(names_) == sorted(generate.blocks())


@each_current_page
def test_each_example_with_generated_numbers_is_a_command_and_its_answer(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    assert len(generate.ANSWER.findall(text)) == text.count("\n<!-- numbers by `make docs` -->")


@pytest.mark.parametrize("page", [*CURRENT, ROOT / "Dockerfile"], ids=lambda page: str(page.relative_to(ROOT)))
def test_no_document_has_a_path_of_this_machine(page: Path) -> None:
    assert re.search(r"/(work|root|tmp)/", page.read_text(encoding="utf-8")) is None

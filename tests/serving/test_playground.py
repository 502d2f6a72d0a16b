"""The playground's files, which use nothing but this service; tests/clients tests the page in a browser."""

import re
from pathlib import Path

import httpx
import pytest

from bertserve.service.api import playground
from bertserve.service.settings import ENV_PREFIX
from bertserve.service.tasks.catalog import TASKS
from support.app_client import call

FOLDER = Path(playground.__file__).parent


@pytest.mark.parametrize("page", ["/", "/docs"])
def test_the_service_serves_a_page_and_all_its_files(models: Path, page: str) -> None:
    files = re.findall(r"""(?:src|href|url)\s*[=:]\s*["']([^"'#][^"']*)["']""", call(models, "GET", page).text)
    files = [file for file in files if not file.startswith("data:")]
    answers = [call(models, "GET", httpx.URL("http://test").join(page).join(file).path) for file in files]
    types = {answer.headers["content-type"].partition(";")[0] for answer in answers}

    assert {answer.status_code for answer in answers} == {200}
    assert [file for file in files if file.startswith(("http:", "https:", "//", "/"))] == []
    assert {"text/css", "text/javascript"} <= types


def test_the_files_of_the_docs_are_served_from_memory(models: Path) -> None:
    """A range request gets the whole file, because a range would keep a file open while the client reads."""
    whole, part = (call(models, "GET", "/docs/static/swagger-ui.css", headers=headers) for headers in ({}, {"range": "bytes=0-9"}))
    assert whole.status_code == 200
    assert part.status_code == 200
    assert part.content == whole.content
    assert call(models, "GET", "/docs/static/nothing.js").status_code == 404


def test_the_page_loads_nothing_from_other_hosts(models: Path) -> None:
    policy = call(models, "GET", "/").headers["content-security-policy"]
    addresses = {
        address for file in FOLDER.iterdir() if file.is_file() for address in re.findall(r"https?://[^\s\"']+", file.read_text("utf-8"))
    }

    assert addresses == {"http://www.w3.org/2000/svg"}  # an XML namespace
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_every_task_has_a_form(models: Path) -> None:
    forms = call(models, "GET", "/playground/forms.json").json()
    views = set(
        re.findall(r"^  (\w+): (?:\{|[A-Z]+,)", (FOLDER / "forms.js").read_text("utf-8").partition("export const VIEWS")[2], re.MULTILINE)
    )

    assert list(forms) == [f"/{spec.path}" for spec in TASKS.values()]
    assert views == {"json"} | {form["view"] for form in forms.values()}
    for form in forms.values():
        names = [field["name"] for field in form["fields"]]
        assert len(names) == len(set(names))
        assert [name for example in form["examples"] for name in example["values"] if name not in names] == []


def test_every_file_of_the_folder_is_served() -> None:
    assert sorted(file.name for file in FOLDER.iterdir() if file.suffix in {".html", ".css", ".js", ".json"}) == sorted(
        [playground.PAGE, *playground.FILES]
    )


def test_scripts_insert_no_html() -> None:
    for name in playground.FILES:
        assert re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", (FOLDER / name).read_text("utf-8")) is None


def test_the_key_variable_of_the_snippets_is_not_a_setting(models: Path) -> None:
    """The service refuses unknown BERT_SERVE_* variables. With another prefix, a shell that has the variable can start the service."""
    assert "BERTSERVE_API_KEY" in (code := call(models, "GET", "/playground/snippets.js").text)
    assert ENV_PREFIX not in code

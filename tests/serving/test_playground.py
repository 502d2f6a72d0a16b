"""The playground: its files, and what keeps them to this service. What the page does in a browser is tested in tests/clients."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from application import call, play
from bertserve.service.http import playground
from bertserve.service.serving.build import build
from bertserve.service.settings import PREFIX, Settings
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.occlusion import MAX_WORDS

FOLDER = Path(playground.__file__).parent


def test_the_page_and_all_that_it_refers_to_come_from_here(models: Path) -> None:
    """By addresses relative to the page, each of the type that a browser asks for."""

    async def check(client: httpx.AsyncClient) -> dict[str, tuple[int, str]]:
        page = (await client.get("/")).text
        scripts = [name for name in playground.FILES if name.endswith(".js")]
        asked = re.findall(r"""(?:src|href)="([^"#][^"]*)\"""", page) + [f"playground/{name}" for name in scripts]
        found = {}
        for file in asked:
            if not file.startswith("data:"):
                response = await client.get(httpx.URL("http://test/").join(file))
                found[file] = response.status_code, response.headers["content-type"].partition(";")[0]
        return found

    found = play(build(Settings(models=models)), check)

    assert {200} == {status for status, _ in found.values()}
    assert ("text/css", "text/javascript") == (found["playground/playground.css"][1], found["playground/playground.js"][1])
    assert [] == [file for file in found if file.startswith(("http:", "https:", "//", "/"))]


def test_the_files_of_docs_are_answered_from_memory(models: Path) -> None:
    """Whole, each with its type: a range would need a file that stays open for as long as the client reads."""
    types = {}
    for name in re.findall(r"docs/static/([^\"']+)", call(models, "GET", "/docs").text):
        whole = call(models, "GET", f"/docs/static/{name}")
        asked = call(models, "GET", f"/docs/static/{name}", headers={"range": "bytes=0-9"})
        assert (200, 200, whole.content) == (whole.status_code, asked.status_code, asked.content)
        types[name] = whole.headers["content-type"].partition(";")[0]
    assert {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css", "favicon-32x32.png": "image/png"} == types
    assert 404 == call(models, "GET", "/docs/static/nothing.js").status_code


def test_nothing_is_loaded_from_outside(models: Path) -> None:
    """No file names another host, and the page's policy would not let it."""
    policy = call(models, "GET", "/").headers["content-security-policy"]
    addresses = {
        address for file in FOLDER.iterdir() if file.is_file() for address in re.findall(r"https?://[^\s\"']+", file.read_text("utf-8"))
    }

    assert {"http://www.w3.org/2000/svg"} == addresses  # the name of a namespace
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_modules_import_what_is_there() -> None:
    for name in playground.FILES:
        text = (FOLDER / name).read_text("utf-8")
        for names, file in re.findall(r'import \{ ([^}]+) \} from "./([^"]+)"', text):
            assert file in playground.FILES
            exported = re.findall(r"export (?:async function|function|const) (\w+)", (FOLDER / file).read_text("utf-8"))
            assert [] == [each for each in names.split(", ") if each not in exported]


def test_every_task_has_a_form(models: Path) -> None:
    """Which the page gets, and can show: controls by distinct names, and a view that it has."""
    forms = call(models, "GET", "/playground/forms.json").json()
    views = set(
        re.findall(r"^  (\w+): (?:\{|[A-Z]+,)", (FOLDER / "forms.js").read_text("utf-8").partition("export const VIEWS")[2], re.MULTILINE)
    )

    assert [f"/{spec.path}" for spec in TASKS.values()] == list(forms)
    assert {"json"} | {form["view"] for form in forms.values()} == views
    for form in forms.values():
        names = [field["name"] for field in form["fields"]]
        assert len(set(names)) == len(names)
        assert [] == [name for example in form["examples"] for name in example["values"] if name not in names]


def test_every_file_of_the_folder_is_served() -> None:
    assert sorted([playground.PAGE, *playground.FILES]) == sorted(
        file.name for file in FOLDER.iterdir() if file.suffix in {".html", ".css", ".js"}
    )


def test_the_page_knows_the_limit_of_words(models: Path) -> None:
    fields = call(models, "GET", "/playground/forms.json").json()["/classify"]["fields"]

    assert [MAX_WORDS] == [field["most_words"] for field in fields if field["name"] == "explain"]


def test_texts_are_only_put_into_text_nodes() -> None:
    for name in playground.FILES:
        assert re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", (FOLDER / name).read_text("utf-8")) is None


def test_the_variable_of_the_key_is_no_setting(models: Path) -> None:
    """A shell that has it, as the request to copy wants, can still start the service, which refuses unknown BERT_SERVE_* variables."""
    assert "BERTSERVE_API_KEY" in (code := call(models, "GET", "/playground/snippets.js").text)
    assert PREFIX not in code


def test_the_page_speaks_of_itself(models: Path) -> None:
    """It asks for a key by its own field, not by a header, and names metrics as monitoring does."""
    page, load = (call(models, "GET", f"/playground/{name}.js").text for name in ("playground", "load"))
    assert "needs an API key" in page
    assert [] == [title for title in ("Requests per second", "Average batch size", "Median latency", "p99 latency") if title not in load]

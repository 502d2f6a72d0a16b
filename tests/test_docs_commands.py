"""Commands in the documentation work: requests get the answers that pages show, and the image gets its files."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bertserve.service.check import difference
from conftest import Served

ROOT = Path(__file__).parent.parent
Serve = Callable[..., AbstractContextManager[Served]]


def document(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_requests_get_the_answers_that_pages_show(serve: Serve) -> None:
    """The included models answer each curl command with the JSON below it. Scores differ by at most 0.05: they are rounded, and int8."""
    pattern = r"```bash\ncurl -s localhost:8000(\S+) -d '([^\n]+?)'\n```\n\n<!-- [^\n]+ -->\n```json\n(.+?)\n```"
    shown = {name: re.findall(pattern, document(name), re.DOTALL) for name in ("README.md", "docs/reference/tasks.md")}
    assert {"README.md": 1, "docs/reference/tasks.md": 9} == {name: len(found) for name, found in shown.items()}

    with serve(ROOT / "models") as served:
        for name, requests in shown.items():
            for path, body, answer in requests:
                with urllib.request.urlopen(served.url + path, body.encode(), timeout=20) as response:
                    assert difference(json.loads(answer), json.load(response), 0.05) is None, (name, path)


def test_check_passes_on_the_embedded_models() -> None:
    command = [Path(sys.executable).with_name("bert-serve"), "check", "--models", str(ROOT / "models")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert 0 == result.returncode
    assert ["embed", "fill-mask", "ner", "nli", "qa", "rerank", "sentiment"] == [
        line.split(":")[0] for line in result.stdout.splitlines() if line.endswith(": ok")
    ]


def test_containers_the_unit_and_make_serve_set_the_same_memory_settings() -> None:
    """They are also the settings in docs/how-to/operations.md, and this machine's C library supports them."""
    made = re.findall(r"glibc\.malloc\.\S+", document("Makefile"))
    for name in ("Dockerfile", "deploy/systemd/bertserve@.service"):
        assert made == re.findall(r"glibc\.malloc\.\S+", document(name))
    assert f"GLIBC_TUNABLES={made[0]}" in document("docs/how-to/operations.md")
    if not (loader := Path("/lib64/ld-linux-x86-64.so.2")).exists():
        pytest.skip("not a machine with glibc for x86-64")
    known = subprocess.run([loader, "--list-tunables"], capture_output=True, text=True, check=True).stdout
    assert {setting.partition("=")[0] for setting in made[0].split(":")} <= {line.partition(":")[0] for line in known.splitlines()}


def test_the_build_context_has_all_files_that_the_dockerfile_copies() -> None:
    """`.dockerignore` excludes all files except the paths that it lists with `!`."""
    kept = {line.removeprefix("!") for line in document(".dockerignore").splitlines() if line.startswith("!")}
    lines = [line for line in document("Dockerfile").splitlines() if line.startswith("COPY ") and "--from=" not in line]
    copied = [source.partition("/")[0] for line in lines for source in line.split()[1:-1]]

    assert {"bertserve", "service", "export", "bench", "models", "pyproject.toml"} <= set(copied)
    assert set(copied) <= kept

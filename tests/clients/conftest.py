"""Fixtures and helpers for client tests: a service with the included models and a tiny model, and a browser."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import ROOT

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}

HERE = Path(__file__).parent
NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium")

needs_browser = pytest.mark.skipif(
    NODE is None or CHROMIUM is None or not (HERE / "node_modules/playwright-core").is_dir(),
    reason="needs chromium, node and playwright-core",
)


def in_browser(script: str, url: str, *more: str) -> dict[str, Any]:
    """Returns the JSON output of a script that visits a page in Chromium."""
    command = [str(NODE), str(HERE / script), url, str(CHROMIUM), *more]
    visit = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert visit.returncode == 0, visit.stderr
    page: dict[str, Any] = json.loads(visit.stdout)
    return page


@contextmanager
def running(tiny_models: Path, *flags: str) -> Iterator[str]:
    """Yields the URL of a service with the included models and the models of a folder."""
    command = [ROOT / ".venv/bin/bert-serve", "serve", "--port", "0", "--models", ROOT / "models", "--models", tiny_models]
    process = subprocess.Popen([*command, *flags], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        listening = next((line for line in process.stdout if " listens on " in line), None)
        assert listening is not None, "the service did not start"
        yield listening.split(" listens on ")[1].split(",")[0]
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@pytest.fixture(name="tiny_models", scope="session")
def tiny_models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the tiny models `attention` and `calibrated`."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([ROOT / ".venv-dev/bin/python", ROOT / "tests/clients/tiny_models.py", folder], env=ENVIRONMENT, check=True)
    return folder


@pytest.fixture(name="url", scope="session")
def service_url(tiny_models: Path) -> Iterator[str]:
    """Yields the URL of a service with the included models and the tiny models."""
    with running(tiny_models) as url:
        yield url

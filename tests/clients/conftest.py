"""A service for third-party clients: that of `make serve` with a tiny model in addition to the embedded ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


@contextmanager
def running(tiny_models: Path, *flags: str) -> Iterator[str]:
    """Runs a service with the embedded models and those of a folder; yields its address."""
    command = [ROOT / ".venv/bin/bert-serve", "serve", "--port", "0", "--models", ROOT / "models", "--models", tiny_models]
    process = subprocess.Popen([*command, *flags], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        listening = next((line for line in process.stdout if " listens on " in line), None)
        assert listening is not None, "the service did not start"
        yield listening.split(" listens on ")[1].split(",")[0]
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(name="tiny_models", scope="session")
def tiny_models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model `rank`: none of the embedded ones is a cross-encoder, or gives its attention out."""
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([ROOT / ".venv-dev/bin/python", ROOT / "tests/clients/tiny_models.py", folder], env=ENVIRONMENT, check=True)
    return folder


@pytest.fixture(name="url", scope="session")
def service_url(tiny_models: Path) -> Iterator[str]:
    """The address of a service with the embedded models and the tiny one `rank`."""
    with running(tiny_models) as url:
        yield url

"""Runs all commands of the tutorial, from training to the load test."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bertserve.service.bundle.example import difference
from support import ROOT, wait_until
from support.replica import free_ports, is_ready

pytestmark = [pytest.mark.torch, pytest.mark.full_grid]

TOLERANCE = 0.3  # trained weights differ between machines


@dataclass(frozen=True)
class Tutorial:
    """The page, whose commands run in an empty folder, with another port than 8000."""

    folder: Path
    port: str

    def blocks(self, language: str) -> list[str]:
        page = (ROOT / "docs/tutorial/first-bundle.md").read_text(encoding="utf-8")
        blocks = re.findall(rf"```{language}\n(.+?)\n```", page, re.S)
        return [block.replace("examples/", f"{ROOT}/examples/").replace("8000", self.port) for block in blocks]

    def run(self, command: str) -> str:
        """Runs a command that must end with exit code 0; returns its stdout."""
        result = subprocess.run(command, shell=True, cwd=self.folder, env=environment(), capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    @contextmanager
    def serving(self, command: str) -> Iterator[None]:
        """Runs the service until the end of the block."""
        with subprocess.Popen(
            f"exec {command} --port {self.port}", shell=True, cwd=self.folder, env=environment(), stdout=subprocess.PIPE
        ) as service:
            try:
                wait_until(lambda: is_ready(f"http://127.0.0.1:{self.port}"))
                yield
            finally:
                service.terminate()

    def assert_answer(self, expected: str, command: str) -> None:
        """Asserts that a response has the same best labels and about the same scores as the response on the page."""
        expected, answer = json.loads(expected), json.loads(self.run(command))
        assert [row[0]["label"] for row in answer] == [row[0]["label"] for row in expected]
        for one, other in zip(expected, answer, strict=True):
            assert difference(one[0], other[0], TOLERANCE) is None


def environment() -> dict[str, str]:
    """Returns the environment with the programs of this Python on the path."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def assert_accuracy(trained: str, verified: str) -> None:
    """Asserts that the fp32 graph has the accuracy that training printed, and that int8 is within 0.01 of it."""
    (expected,) = re.findall(r"accuracy (\S+) on 720", trained)
    fp32, int8 = re.findall(r"accuracy cpu/\w+ +(\S+)", verified)
    assert fp32 == expected
    assert float(int8) == pytest.approx(float(fp32), abs=0.01)


def test_the_commands_of_the_tutorial_work(tmp_path: Path) -> None:
    page = Tutorial(tmp_path, str(free_ports(1)[0]))
    _, train, export, check, serve, request, request_two, wrong_request, export_again, verify, load = page.blocks("bash")

    trained = page.run(train)
    page.run(export)
    assert "support: text-classification, cpu/fp32: ok" in page.run(check)
    with page.serving(serve):
        for output, command in zip(page.blocks("json"), [request, request_two], strict=True):
            page.assert_answer(output, command)
        assert "`top_k`" in page.run(wrong_request)
    page.run(export_again)
    assert_accuracy(trained, page.run(verify))
    with page.serving(serve):
        assert "passed: error_rate <= 0" in page.run(load.replace("--seconds 5", "--seconds 1"))
    assert (tmp_path / "load.html").is_file()

"""The HTML report of `bert-bench` in a real Chromium, driven by playwright-core (`report_page.mjs`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, ROOT, in_browser, needs_browser

pytestmark = needs_browser


@pytest.mark.parametrize("width", [390, 1280])
def test_a_report_needs_no_horizontal_scrolling(width: int, tmp_path: Path) -> None:
    """The table, the plots and the open settings fit a phone and a desktop screen."""
    report, page = ROOT / "tests/benching/report_of_0_1_0.json", tmp_path / "report.html"
    command = [ROOT / ".venv-dev/bin/bert-bench", "report", report, "--html", page]
    subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    seen = in_browser("report_page.mjs", page.as_uri(), str(width))

    assert (width, [], 2, 5) == (seen["width"], seen["outside"], seen["rows"], seen["plots"])

"""The HTML report of `bert-bench` in a real Chromium, driven by playwright-core (`report_page.mjs`)."""

import subprocess
from pathlib import Path

import pytest

from conftest import ENVIRONMENT, in_browser, needs_browser
from support import ROOT

pytestmark = needs_browser


@pytest.mark.parametrize("width", [390, 1280])
def test_a_report_needs_no_horizontal_scrolling(width: int, tmp_path: Path) -> None:
    """The summary, the plots and the open report fit a phone and a desktop screen, and the text of the plots is readable."""
    page = tmp_path / "report.html"
    command = [ROOT / ".venv-dev/bin/python", ROOT / "tests/benching/sweep_page.py", page]
    subprocess.run(command, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, check=True)
    facts = in_browser("report_page.mjs", page.as_uri(), str(width))

    assert (facts["width"], facts["outside"], facts["plots"]) == (width, [], 3)
    assert facts["smallest_text_px"] >= 10

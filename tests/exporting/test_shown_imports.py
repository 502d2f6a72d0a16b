"""Pages show imports of bertserve that work. Some of them load torch, so this file is among the tests of exports."""

import re

import pytest

from support import ROOT

pytestmark = pytest.mark.torch

PAGES = [page for pattern in ("README.md", "docs/**/*.md", "bench/*.md", "examples/*.md") for page in ROOT.glob(pattern)]
IMPORTS = {line for page in PAGES for line in re.findall(r"^\s*((?:from|import) bertserve\b.*)$", page.read_text("utf-8"), re.MULTILINE)}


@pytest.mark.parametrize("line", sorted(IMPORTS))
def test_a_shown_import_works(line: str) -> None:
    exec(line)

"""Serving leaves no files behind and sends no telemetry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_onnx_runtime_stores_no_device_id(models: Path, tmp_path: Path) -> None:
    """ONNX Runtime's telemetry writes an identifier into the user's cache folder; the service turns it off before it starts."""
    home = tmp_path / "home"
    home.mkdir()
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "CI", "XDG_"))}
    code = "from bertserve.service.models.build import build; from bertserve.service.settings import Settings; build(Settings())"
    environment = outside | {"HOME": str(home), "BERT_SERVE_MODELS": str(models)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)

    assert [] == [path for path in home.rglob("*") if path.is_file()]

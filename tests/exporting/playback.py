"""Replaces the slow stages of an export with recordings, for tests that do not depend on the results of these stages."""

import functools
import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.bundle.files import digest
from bundles import exported
from checkpoints import bert

STAGES = ("onnx_trace.trace", "cpu.fuse", "pipeline.sample_reference", "int8.quantize.quantize")


@dataclass(frozen=True)
class Recorded:
    """The result of a stage and the files that it wrote, by the index of the argument with the path."""

    result: Any
    files: dict[int, bytes]


def play_back(patch: pytest.MonkeyPatch, source: Path) -> None:
    """Replaces the slow stages in exports of the default checkpoint, in fp32 with or without int8, with recordings."""
    weights, recordings = _recordings()
    assert weights == digest(source / "model.safetensors"), "what was recorded is the usual checkpoint's"
    for stage, recorded in recordings.items():
        patch.setattr(f"bertserve.export.{stage}", functools.partial(_played, recorded))


def _played(recorded: Recorded, *args: Any, **_: Any) -> Any:
    for place, content in recorded.files.items():
        args[place].write_bytes(content)
    return recorded.result


@functools.cache
def _recordings() -> tuple[str, dict[str, Recorded]]:
    """Returns the digest of the default checkpoint's weights and the recordings of its slow stages, from one real export."""
    recordings: dict[str, Recorded] = {}

    def recording(stage: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **options: Any) -> Any:
            absent = [place for place, value in enumerate(args) if isinstance(value, Path) and not value.exists()]
            result = run(*args, **options)
            recordings[stage] = Recorded(result, {place: args[place].read_bytes() for place in absent})
            return result

        return record

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        source = bert(folder)
        for stage in STAGES:
            module, _, function = stage.rpartition(".")
            patch.setattr(
                f"bertserve.export.{stage}", recording(stage, getattr(importlib.import_module(f"bertserve.export.{module}"), function))
            )
        exported(source, precisions=None)
        assert set(STAGES) == set(recordings)
        return digest(source / "model.safetensors"), recordings

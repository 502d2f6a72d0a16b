"""Loaded bundles whose graph a test runs directly: the included ones, which tests compare with golden files, and tiny ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from bertserve.service.body.reading import parse_json, validate_as
from bertserve.service.body.task_body import Limits
from bertserve.service.bundle import files
from bertserve.service.bundle.graph_spec import Outputs
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from support import ROOT

LIMITS = Limits(max_inputs=512, max_chars=200_000)
# The golden cases that run on an included graph: `make test` runs every twelfth case.
STEPS = [pytest.param(12, id="twelfth"), pytest.param(1, id="all", marks=pytest.mark.full_grid)]


@dataclass(frozen=True)
class EmbeddedBundle:
    """A bundle that is loaded when a test needs it first, because each test process imports all test files."""

    path: Path
    threads: int = 1

    @cached_property
    def _bundle(self) -> files.Bundle:
        return files.load_bundle(self.path)

    @property
    def manifest(self) -> Manifest:
        return self._bundle.manifest

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self._bundle.tokenizer_path, self.manifest.tokenizer)

    @cached_property
    def engine(self) -> OnnxEngine:
        spec, graph = self.manifest.tokenizer, self._bundle.graph("cpu")
        return OnnxEngine(self.path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, threads=self.threads)

    def rows(self, encodings: Sequence[Encoding]) -> list[Outputs]:
        """Runs encodings one by one, as the service does with a graph that is not batch-invariant."""
        return [self.engine.run([encoding])[0] for encoding in encodings]


def load(name: str, threads: int = 1) -> EmbeddedBundle:
    return EmbeddedBundle(ROOT / "models" / name, threads)


def parse(task: str, request: dict[str, Any]) -> Any:
    """Parses a request body as the service does."""
    return validate_as(TASKS[task].body, parse_json(json.dumps(request).encode()), LIMITS)

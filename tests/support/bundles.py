"""Exports bundles for tests and runs them in the service's tokenizer, engine and decoders. Importing this module does not import torch."""

import json
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from bertserve.service.body.json_text import to_plain
from bertserve.service.body.reading import parse_json, validate_as
from bertserve.service.body.task_body import Limits
from bertserve.service.bundle.files import Bundle, load_bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Outputs
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.step import Step
from bertserve.service.tasks.task_spec import TaskSpec
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from support import ROOT
from support.task_runs import decode, encode

FAST = ("--precision", "fp32")
FEW_TEXTS = Path(__file__).with_name("few_texts.txt")  # the first built-in calibration texts and a sample: enough for a tiny model
Array = NDArray[Any]
Run = Callable[..., tuple[int, str]]
Verify = Callable[..., tuple[int, dict[str, Any]]]
# The golden cases that run on an included graph: `make test` runs every twelfth case.
STEPS = [pytest.param(12, id="twelfth"), pytest.param(1, id="all", marks=pytest.mark.full_grid)]


def exported(source: str | Path, output: Path | None = None, **options: Any) -> Bundle:
    """Exports a checkpoint with few calibration texts, by default in fp32 and to the folder `models` next to it; returns the bundle."""
    from bertserve.export.pipeline import ExportOptions, export

    spec = ExportOptions(
        str(source), output or Path(source).parent / "models", **{"precisions": ("fp32",), "int8_texts": FEW_TEXTS, **options}
    )
    return load_bundle(export(spec)[0])


def exported_by_default(source: Path, output: Path | None = None) -> Bundle:
    """Exports like `exported`, but in both precisions and with the default tracers, which take 3 s longer (tests/exporting/conftest.py)."""
    from bertserve.export import onnx_trace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_trace, "TRACERS", tuple(onnx_trace.OPSETS))
        return exported(source, output, precisions=("fp32", "int8"))


def refused(source: Path, **options: Any) -> str:
    """Returns the error of a failed export, and asserts that the export left no files."""
    from bertserve.export.errors import ExportError

    with pytest.raises(ExportError) as caught:
        exported(source, **options)
    assert not list((source.parent / "models").glob("*"))
    return str(caught.value)


def assert_exit(code: int, result: tuple[int, str], *parts: str) -> None:
    """Asserts the exit code of a command, and that its output has these parts. A failure shows the output."""
    assert result[0] == code, result[1]
    assert [part for part in parts if part not in result[1]] == [], result[1]


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Returns the error of `bert-export` with wrong arguments, and asserts exit code 2."""
    from bertserve.export import cli

    with pytest.raises(SystemExit) as exit_:
        cli.main(list(map(str, arguments)))
    assert exit_.value.code == 2
    return capsys.readouterr().err


def engine_of(bundle: Bundle, graph: GraphSpec | None = None, path: Path | None = None, threads: int = 1) -> OnnxEngine:
    """Returns a CPU engine for a graph, whatever the graph's own provider is; `path` replaces the graph's file."""
    graph, spec = graph or bundle.graph("cpu"), bundle.manifest.tokenizer
    file = path or bundle.path / graph.file
    return OnnxEngine(file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side, provider="cpu", threads=threads)


@dataclass(frozen=True)
class Service:
    """Runs a bundle in the service's request reader, tokenizer, engine and decoder, which are loaded when a test first needs them."""

    path: Path
    precision: Any = "fp32"
    provider: Any = "cpu"
    threads: int = 1

    @cached_property
    def _bundle(self) -> Bundle:
        return load_bundle(self.path)

    @cached_property
    def manifest(self) -> Manifest:
        return self._bundle.manifest

    @cached_property
    def task(self) -> TaskSpec:
        return TASKS[self.manifest.task]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self._bundle.tokenizer_path, self.manifest.tokenizer)

    @cached_property
    def engine(self) -> OnnxEngine:
        return engine_of(self._bundle, self._bundle.graph(self.provider, self.precision), threads=self.threads)

    def parse(self, body: dict[str, Any], task: str | None = None) -> Any:
        """Parses a request body as the service does."""
        limits = Limits(max_inputs=512, max_chars=200_000)
        return validate_as(TASKS[task or self.manifest.task].body, parse_json(json.dumps(body).encode()), limits)

    def encode(self, request: Any) -> Step:
        return encode(self.task, request, self.tokenizer, self.manifest)

    def encodings(self, *requests: Any) -> list[Encoding]:
        return [encoding for request in requests for encoding in self.encode(request).encodings]

    def rows(self, encodings: Sequence[Encoding]) -> list[Outputs]:
        """Runs encodings one by one, as the service does with a graph that is not batch-invariant."""
        return [self.engine.run([encoding])[0] for encoding in encodings]

    def alone(self, request: Any) -> list[Outputs]:
        return self.rows(self.encodings(request))

    def decode(self, request: Any, rows: list[Outputs]) -> Any:
        return decode(self.task, request, rows, self.manifest, self.tokenizer)

    def answer(self, body: dict[str, Any], task: str | None = None) -> Any:
        """Returns the response to a request body; all its inputs run in one padded batch."""
        call, task = self.parse(body, task), task or self.manifest.task
        steps = [(input_, encode(TASKS[task], input_, self.tokenizer, self.manifest)) for input_ in call.task_inputs(self.manifest)]
        encodings = [encoding for _, step in steps for encoding in step.encodings]
        rows = iter(self.engine.run(encodings, small_outputs=all(step.small_outputs for _, step in steps)))
        results = [
            decode(TASKS[task], input_, [next(rows) for _ in step.encodings], self.manifest, self.tokenizer) for input_, step in steps
        ]
        return to_plain(call.to_response(results))


def included(name: str, threads: int = 1) -> Service:
    return Service(ROOT / "models" / name, "auto", threads=threads)


def edit_constant(source: Path, name: str, change: Callable[[Array], Array], target: Path | None = None) -> None:
    """Changes the constant whose name ends with `name` in a graph, and writes the graph to its own file or to `target`."""
    model = onnx.load(str(source))
    [tensor] = [tensor for tensor in model.graph.initializer if tensor.name.endswith(name)]
    tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), tensor.name))
    onnx.save(model, str(target or source))


def left_in(output: Path) -> list[str]:
    """Returns the sorted names of all files and folders in the output folder, including hidden ones."""
    return sorted(path.name for path in output.iterdir()) if output.exists() else []


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Makes writes beyond `size` bytes of any file fail as on a full disk, but with EFBIG instead of ENOSPC.

    The limit also applies to pytest's own files, which can be larger: pytest must not write within the block.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)

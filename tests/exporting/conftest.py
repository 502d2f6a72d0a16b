"""Fixtures of the tests of exports. Importing this module does not import torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bertserve.export import cli
from support.bundles import FEW_TEXTS, Run, Verify

STAGED = ("text-classification", "token-classification", "question-answering", "fill-mask")


@pytest.fixture(autouse=True, scope="module")
def quick_export_without_downloads() -> Iterator[None]:
    """Makes exports use TorchScript (0.2 s per tiny model) instead of dynamo (3 s); tests of the tracers choose their own.

    They download nothing; the variable HF_HUB_OFFLINE is only read at the first import.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("bertserve.export.onnx_trace.TRACERS", ("torchscript",))
        yield


@pytest.fixture(name="source")
def source_checkpoint(tmp_path: Path) -> Path:
    from support.checkpoints import bert

    return bert(tmp_path)


@pytest.fixture(name="output")
def output_folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture(name="run")
def run_export(output: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Returns `run(source, *flags)`, which exports with few calibration texts, and returns the exit code and the only error line, if any."""

    def run(source: object, *flags: object) -> tuple[int, str]:
        code = cli.main([str(source), "--output", str(output), "--int8-texts", str(FEW_TEXTS), *map(str, flags)])
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bert-export: ")]
        own = [line for line in lines if not line.startswith("bert-export: WARNING: ")]
        assert (code != 0) == bool(own)
        assert len(own) < 2 or code == 4  # a line per missing graph
        return code, own[0] if own else ""

    return run


@pytest.fixture(name="verify")
def run_verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """Returns `verify(bundle, *flags)`, which returns the exit code and the checks by name."""

    def run(path: object, *flags: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = cli.main(["verify", str(path), "--json", *map(str, flags)])
        report = json.loads(capsys.readouterr().out)
        assert (code == 0) is report["passed"]
        return code, {check["name"]: check for check in report["checks"]}

    return run


@pytest.fixture(name="all_staged", scope="session")
def all_staged_graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns for each task the graphs of a checkpoint after each stage before quantization."""
    from support.staged import checkpoint_of, stage

    folder = tmp_path_factory.mktemp("staged")
    return {task: stage(checkpoint_of(folder, task), folder / f"stages-{task}") for task in STAGED}


@pytest.fixture(name="staged", params=STAGED)
def staged_graphs(request: pytest.FixtureRequest, all_staged: dict[str, Any]) -> Any:
    return all_staged[request.param]

"""Export and serving on a GPU. The tests are skipped, with the reason, on machines without a GPU."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig

from bertserve.service.app_state import AppState
from bertserve.service.build import build
from bertserve.service.bundle import files
from bertserve.service.engine.sessions import unavailable_reason
from bertserve.service.settings import Settings
from support import tiny
from support.bundles import exported
from support.checkpoints import CLASSIFICATION, POSITIONS, ROWS, edit_weights, naming, save
from support.task_runs import classify_input

CUDA, TENSORRT = (unavailable_reason(provider) for provider in ("cuda", "tensorrt"))
pytestmark = [pytest.mark.torch, pytest.mark.gpu]
needs_cuda = pytest.mark.skipif(CUDA is not None, reason=f"no CUDA: {CUDA}")
needs_tensorrt = pytest.mark.skipif(TENSORRT is not None, reason=f"no TensorRT: {TENSORRT}")

TEXTS = ["good", "a very good film , but the book is great !", "1 2 3 4 5 6 7 8 9", "the film was not very good " * 40] * 5
BOUNDS = {"fp32": 1e-4, "fp16": 0.05}
NEEDS = {"cuda": needs_cuda, "tensorrt": needs_tensorrt}
GRAPHS = [pytest.param(provider, precision, marks=marks) for provider, marks in NEEDS.items() for precision in BOUNDS]


@pytest.fixture(name="models", scope="module")
def exported_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the bundle of a classifier with a head size of 32, which the fused kernels support."""
    folder = tmp_path_factory.mktemp("gpu")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    config = BertConfig(vocab_size=ROWS, max_position_embeddings=POSITIONS, **sizes, **naming(tiny.LABELS))
    source = save(folder / "tiny-bert", CLASSIFICATION, config)

    def calm(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                tensors[name] = tensor * 0.3

    # at this width, the large weights of the tiny models amplify half precision's rounding, unlike in a trained model
    edit_weights(source, calm)
    providers = ["cpu", *(["cuda"] if CUDA is None else []), *(["tensorrt"] if TENSORRT is None else [])]
    exported(source, folder / "models", precisions=("fp32", "fp16"), providers=providers)
    return folder / "models"


@pytest.mark.parametrize(("provider", "precision"), GRAPHS)
def test_the_validation_report_was_measured_on_the_gpu(models: Path, provider: Any, precision: Any) -> None:
    graph = files.load_bundle(models / "tiny-bert").graph(provider, precision)

    assert graph.validation.provider == provider
    assert graph.validation.worst_abs_error <= BOUNDS[precision]
    assert graph.batch_invariant


@pytest.mark.parametrize(("provider", "precision"), GRAPHS)
def test_the_service_answers_on_the_gpu(models: Path, tmp_path: Path, provider: Any, precision: Any) -> None:
    async def answer(service: AppState) -> list[dict[str, float]]:
        service.start()
        prediction = await service.registry.get("tiny-bert").predict([classify_input(text) for text in TEXTS], timeout_s=60)
        await service.stop(0)
        return [{score["label"]: score["score"] for score in result} for result in prediction.results]

    on_gpu = build(
        Settings(models=models, provider=provider, precision=precision, max_batch_tokens=1024, engine_cache=tmp_path / "engines")
    )
    expected = asyncio.run(answer(build(Settings(models=models, provider="cpu", precision="fp32"))))

    assert on_gpu.provider == provider
    for a, b in zip(expected, asyncio.run(answer(on_gpu)), strict=True):
        assert a == pytest.approx(b, abs=BOUNDS[precision])


@needs_cuda
def test_cuda_graphs_give_the_same_bits(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(service: AppState) -> list[Any]:
        service.start()
        model = service.registry.get("tiny-bert")
        results = [(await model.predict([classify_input(text)], timeout_s=60)).results for text in TEXTS]
        await service.stop(0)
        return results

    captured, plain = (
        asyncio.run(answer(build(Settings(models=models, provider="cuda", precision="fp16", max_batch_tokens=1024, cuda_graphs=graphs))))
        for graphs in (True, False)
    )
    assert captured == plain
    assert [line for line in caplog.messages if "captured" in line] == []


@needs_tensorrt
def test_engines_are_built_once(models: Path, tmp_path: Path) -> None:
    settings = Settings(models=models, provider="tensorrt", precision="fp16", max_batch_tokens=1024, engine_cache=tmp_path / "engines")
    build(settings)
    first = {path: path.stat().st_mtime_ns for path in (tmp_path / "engines").rglob("*.engine")}
    build(settings)

    assert first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "engines").rglob("*.engine")} == first

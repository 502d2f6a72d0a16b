"""Execution providers: options, the folder of TensorRT engines, and errors for unavailable providers; no test needs a GPU."""

import ctypes
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertserve.service import providers
from bertserve.service.bundle import files
from bertserve.service.bundle.graph_spec import GraphFile, GraphSpec, ShapeBucket, ShapePlan
from bertserve.service.engine import hardware, sessions
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.errors import SettingsError, StartError
from bertserve.service.models import loading
from bertserve.service.providers import GpuOptions
from bertserve.service.text.tokenizer import Encoding
from support import raises_exactly, tiny
from support.app_client import call_once, state_of
from support.fakes import record_runs

PLAN = ShapePlan(buckets=tuple(ShapeBucket(length=n, rows=(1, 2, 4)) for n in (8, 16, 32)))
H100 = ("NVIDIA H100 80GB HBM3", "9.0")
BUILT_WITH = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]


def graph(folder: Path, **changes: Any) -> GraphSpec:
    """Returns the manifest entry of a tiny graph, changed to TensorRT in half precision."""
    spec = files.load_bundle(tiny.bundle(folder)).manifest.graphs[0]
    return spec.model_copy(update={"provider": "tensorrt", "precision": "fp16", "shapes": PLAN} | changes)


class Driver:
    """A fake of NVIDIA's driver library for ctypes, with `devices` identical GPUs."""

    def __init__(self, devices: int = 1, code: int = 0) -> None:
        self.devices = devices
        self.code = code

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.devices
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        ctypes.memmove(name, b"NVIDIA H100 80GB HBM3\0", 22)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> int:
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


def loader(*, driver: Driver | None, missing: str = "") -> Callable[[str], Any]:
    """Returns a library loader for a machine with this driver and without the `missing` library."""

    def load(name: str) -> Any:
        if name == "libcuda.so.1" and driver is not None:
            return driver
        if name == "libcuda.so.1" or missing:
            raise OSError(f"{missing or name}: cannot open shared object file: No such file or directory")
        return object()

    return load


def test_cuda_computes_float32_without_tf32(tmp_path: Path) -> None:
    """With TF32, a float32 graph would not match its validation report. The memory arena grows only by the requested size."""
    options = {kind: providers.cuda_options(graph(tmp_path / kind, precision=kind)) for kind in ("fp32", "fp16")}
    assert [options[kind]["use_tf32"] for kind in ("fp32", "fp16")] == ["0", "1"]
    assert providers.cuda_options(graph(tmp_path / "arena"))["arena_extend_strategy"] == "kSameAsRequested"


def test_sessions_run_on_the_chosen_gpu_within_its_limit(tmp_path: Path) -> None:
    gpu = GpuOptions(2, mem_limit_mib=300)
    spec = graph(tmp_path)
    cuda, tensorrt = providers.cuda_options(spec, None, gpu), providers.tensorrt_options(spec, None, gpu)
    assert cuda["device_id"] == "2"
    assert tensorrt["device_id"] == "2"
    assert cuda["gpu_mem_limit"] == str(300 * 2**20)
    assert "gpu_mem_limit" not in providers.cuda_options(spec)


@pytest.mark.parametrize(("precision", "flag"), [("fp32", "0"), ("fp16", "1")])
def test_tensorrt_uses_the_precision_of_the_graph_and_the_folder_of_engines(tmp_path: Path, precision: str, flag: str) -> None:
    spec = graph(tmp_path, precision=precision)
    for folder, caching, paths in ((None, "0", set()), (tmp_path / "engines", "1", {str(tmp_path / "engines")})):
        options = providers.tensorrt_options(spec, folder)
        assert options["trt_fp16_enable"] == flag
        assert options["trt_profile_max_shapes"] == "input_ids:4x32,attention_mask:4x32,token_type_ids:4x32"
        assert {options["trt_engine_cache_enable"], options["trt_timing_cache_enable"]} == {caching}
        assert {value for name, value in options.items() if "path" in name} == paths


def test_tensorrt_has_a_session_for_short_middle_and_long_texts(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime runs only the first profile of an engine. Each session compiles one range of lengths and runs only batches of it."""
    runs = []

    class Session:
        def __init__(self, shapes: str) -> None:
            self.shapes = shapes

        def get_providers(self) -> list[str]:
            return BUILT_WITH

        def run(self, names: list[str], feed: dict[str, Any]) -> list[Any]:
            runs.append((feed["input_ids"].shape[1], self.shapes.partition(",")[0]))
            return [np.zeros((len(feed["input_ids"]), 2), dtype=np.float32)]

    monkeypatch.setattr(sessions.ort, "get_available_providers", lambda: BUILT_WITH)
    monkeypatch.setattr(sessions.ort, "preload_dlls", lambda: None)
    monkeypatch.setattr(
        sessions.ort, "InferenceSession", lambda path, options, providers, **_: Session(providers[0][1]["trt_profile_max_shapes"])
    )
    plan = ShapePlan(buckets=tuple(ShapeBucket(length=n, rows=(1, 2)) for n in (8, 16, 24, 32, 64)))
    spec = files.load_bundle(models / "tiny").manifest.graphs[0].model_copy(update={"provider": "tensorrt", "shapes": plan})
    engine = OnnxEngine(models / "tiny" / spec.file, spec, pad_id=0, padding_side="right")
    for length in (5, 17, 64):
        engine.run([Encoding(np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64))])

    assert runs == [(8, "input_ids:2x16"), (24, "input_ids:2x32"), (64, "input_ids:2x64")]


def tensorrt_loader(*majors: str) -> Callable[[str], str]:
    """Returns a library loader for a machine with these versions of TensorRT, which returns the name of what it loads."""

    def load(name: str) -> str:
        if name.rpartition(".so.")[2] not in majors:
            raise OSError(f"{name}: cannot open shared object file")
        return name

    return load


def test_tensorrt_is_loaded_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", tensorrt_loader("10"))
    assert providers.load_tensorrt() == "libnvinfer.so.10"
    (tmp_path / "tensorrt_libs").mkdir()
    (tmp_path / "tensorrt_libs/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert providers.load_tensorrt() == str(tmp_path / "tensorrt_libs/libnvinfer.so.10")


@pytest.mark.parametrize("majors", [(), ("11",)])
def test_a_missing_or_newer_tensorrt_is_named(majors: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime links version 10, and `pip install tensorrt` installs a newer one."""
    gpu, tensorrt = loader(driver=Driver()), tensorrt_loader(*majors)
    monkeypatch.setattr(sessions.ort, "get_available_providers", lambda: BUILT_WITH)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: tensorrt(name) if "nvinfer" in name or "nvonnx" in name else gpu(name))
    reason = sessions.missing("tensorrt")

    assert "TensorRT 10" in reason
    assert "[tensorrt]" in reason


def test_tensorrt_without_a_shape_plan_is_refused(tmp_path: Path) -> None:
    """Without a plan, TensorRT would rebuild the engine for new shapes."""
    with raises_exactly(StartError, match="`bert-export --provider tensorrt`"):
        providers.tensorrt_options(graph(tmp_path, shapes=None), None)


def test_incompatible_engines_have_different_folders(tmp_path: Path) -> None:
    """The folder depends only on the graph, separate weights, precision, shape profile, GPU, and versions of TensorRT and ONNX Runtime."""

    def folder(gpu: tuple[str, str] = H100, compiler: str = "trt101401", **changes: Any) -> Path:
        return sessions.graph_cache_dir(tmp_path, spec.model_copy(update=changes), gpu, compiler=compiler)

    spec = graph(tmp_path)
    narrower = ShapePlan(buckets=(*PLAN.buckets[:2], ShapeBucket(length=32, rows=(1,))))
    fewer = ShapePlan(buckets=tuple(ShapeBucket(length=n, rows=(1, 2)) for n in (8, 16, 32)))
    folders = [
        folder(),
        folder(sha256="f" * 64),
        *(folder(data=(GraphFile(file="w", sha256=digit * 64),)) for digit in "ef"),
        folder(precision="fp32"),
        folder(shapes=fewer),
        folder(("NVIDIA H200", "9.0")),
        folder(compiler="trt101500"),
    ]

    assert len(set(folders)) == len(folders)
    assert folder(shapes=narrower) == folders[0]  # a plan with the same profile
    assert folders[0].name.endswith(f"-NVIDIA-H100-80GB-HBM3-sm9.0-trt101401-ort{sessions.VERSION}")


@pytest.mark.parametrize(
    ("load", "available", "words"),
    [
        (loader(driver=Driver()), ["CPUExecutionProvider"], f"{sessions.VERSION} lacks it (it has CPUExecutionProvider)"),
        (loader(driver=None), BUILT_WITH, "driver (libcuda.so.1: "),
        (loader(driver=Driver(devices=0)), BUILT_WITH, "`nvidia-smi`"),
        (loader(driver=Driver(code=100)), BUILT_WITH, "`nvidia-smi`"),
        (loader(driver=Driver(devices=3)), BUILT_WITH, "--device-id is 3, and the GPUs of this process are 0 to 2"),
        (loader(driver=Driver(), missing="libcublasLt.so.12"), BUILT_WITH, "(libcublasLt.so.12: "),
    ],
    ids=["wheel", "driver", "GPU", "initialization", "index", "library"],
)
def test_what_is_missing_is_named(load: Callable[[str], Any], available: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions.ort, "get_available_providers", lambda: available)
    monkeypatch.setattr(ctypes, "CDLL", load)
    assert words in sessions.missing("cuda", 3 if "--device-id" in words else 0)


def test_a_complete_machine_lacks_nothing_and_names_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions.ort, "get_available_providers", lambda: BUILT_WITH)
    monkeypatch.setattr(ctypes, "CDLL", loader(driver=Driver()))
    assert "are installed" in sessions.missing("cuda")
    assert hardware.find_gpu() == H100


def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all providers except the CPU unavailable, even on a machine with a GPU."""
    monkeypatch.setattr(
        loading, "unavailable_reason", lambda provider, device_id: "there is no NVIDIA driver." if provider != "cpu" else None
    )


def test_an_unavailable_provider_stops_the_start(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_a_gpu(monkeypatch)

    with raises_exactly(StartError, match=r"--provider cuda .*no NVIDIA driver.*--allow-provider-fallback"):
        state_of(models, provider="cuda")


def test_an_allowed_fallback_is_logged_and_reported(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_a_gpu(monkeypatch)
    settings = {"provider": "cuda", "precision": "fp16", "allow_provider_fallback": True}

    with caplog.at_level(logging.WARNING, logger="bertserve.loading"):
        page = call_once(state_of(models, **settings), "GET", "/info").json()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["SERVING ON THE CPU"]
    assert [page["machine"][name] for name in ("requested_provider", "provider", "gpu")] == ["cuda", "cpu", None]
    model = call_once(state_of(models, **settings), "GET", "/models/tiny").json()
    assert [model[name] for name in ("requested_provider", "provider", "precision")] == ["cuda", "cpu", "fp32"]


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"max_queue_tokens": 999, "max_batch_tokens": 1000}, "is 999.* 999.* is 1000"),
        ({"max_queue_tokens": 10000, "workers": 2}, "is 10000.* 5000.* is 8192"),
        ({"max_queue_tokens": 10000, "provider": "cuda"}, "is 10000.* 10000.* is 16384"),
    ],
)
def test_a_queue_that_is_smaller_than_a_batch_is_refused(
    models: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], numbers: str
) -> None:
    monkeypatch.setattr(loading, "unavailable_reason", lambda provider, device_id: None)
    with pytest.raises(SettingsError, match=f"--max-queue-tokens {numbers}"):
        state_of(models, **settings)


@pytest.mark.parametrize(
    ("precision", "flags", "threads", "tokens"),
    [
        ("fp16", {}, 2, 16384),
        ("fp32", {}, 2, 8192),
        ("fp16", {"threads": 1, "max_batch_tokens": 4096}, 1, 4096),
        ("fp16", {"workers": 3}, 1, 16384),
    ],
)
async def test_a_gpu_has_defaults_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    precision: str,
    flags: dict[str, int],
    threads: int,
    tokens: int,
) -> None:
    """The start says how many threads it has, and how large batches are; a plan with larger batches is cut."""
    monkeypatch.setattr(loading, "unavailable_reason", lambda provider, device_id: None)
    monkeypatch.setattr("bertserve.service.build.usable_cores", lambda: 16)
    record_runs(monkeypatch, lambda feed: None, provider="cpu")
    plan = ShapePlan(buckets=(ShapeBucket(length=32, rows=(1, 128, 256, 512)),))
    changes = {"provider": "cuda", "precision": precision, "shapes": plan.model_dump(mode="json")}
    tiny.edit(tiny.bundle(tmp_path), lambda fields: fields["graphs"][0].update(changes))
    with caplog.at_level(logging.INFO, logger="bertserve.loading"):
        service = state_of(tmp_path, provider="cuda", cuda_graphs=False, **flags)
    model = service.registry.models["tiny"]
    assert service.scheduler.queue.threads == threads
    assert model.max_batch_tokens == tokens
    assert model.graph.shapes is not None
    assert math.prod(model.graph.shapes.all_shapes[0]) == tokens
    [line] = [line for line in caplog.messages if line.startswith("GPU")]
    assert [int(number) for number in re.findall(r"\d+", line)] == [0, threads, 8 // flags.get("workers", 1), tokens]

    # a model that is loaded later has the limit of its own precision
    tiny.edit(tmp_path / "tiny", lambda fields: fields["graphs"][0].update(precision="fp16"))
    await service.reloader.refresh()
    assert service.registry.models["tiny"].max_batch_tokens == flags.get("max_batch_tokens", 16384)

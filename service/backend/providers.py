"""Options of ONNX Runtime's execution providers, and why a session does not get one. Opens no session itself."""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from bertserve.service.backend.hardware import Gpu, Load, first_gpu
from bertserve.service.bundle.graph_spec import GraphSpec, InputSpec, Precision, Provider
from bertserve.service.bundle.shape_plan import ShapePlan
from bertserve.service.errors import ProviderError

NAMES: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# What onnxruntime-gpu loads when a session asks for a provider; each needs further libraries, and the loader names what is missing.
_LIBRARIES: dict[Provider, str] = {
    "cuda": "libonnxruntime_providers_cuda.so",
    "tensorrt": "libonnxruntime_providers_tensorrt.so",
}

Options = dict[str, str]


def cuda(precision: Precision) -> Options:
    """Returns the options of the CUDA provider.

    Args:
        precision: Of the graph. In fp32 products are computed in full: TF32 has ten bits of mantissa, and the evidence is of 23.
    """
    return {
        "device_id": "0",
        # blocks of the next power of two waste up to half of the memory, and the shapes are few and warmed up largest first
        "arena_extend_strategy": "kSameAsRequested",
        # copies on the stream that computes: one batch runs at a time, and there is nothing to overlap
        "do_copy_in_default_stream": "1",
        "use_tf32": "0" if precision == "fp32" else "1",
    }


def tensorrt(graph: GraphSpec, cache: Path | None) -> Options:
    """Returns the options of the TensorRT provider.

    Args:
        graph: The graph with its shape plan, which the one profile spans: a shape outside of it would build the engine again.
        cache: Folder of this graph's engine and timing caches, as `engine_folder` names it; None keeps none.

    Raises:
        ProviderError: The graph has no shape plan.
    """
    if graph.shapes is None:
        raise ProviderError(
            f"`{graph.file}` has no shape plan, and TensorRT needs one; export again with `bert-export --provider tensorrt`."
        )
    least, best, most = (profile(graph.inputs, graph.shapes, size) for size in ("min", "opt", "max"))
    options = {
        "device_id": "0",
        "trt_fp16_enable": "1" if graph.precision == "fp16" else "0",
        "trt_profile_min_shapes": least,
        "trt_profile_opt_shapes": best,
        "trt_profile_max_shapes": most,
        "trt_engine_cache_enable": "0" if cache is None else "1",
        "trt_timing_cache_enable": "0" if cache is None else "1",
    }
    if cache is not None:
        options |= {"trt_engine_cache_path": str(cache), "trt_timing_cache_path": str(cache)}
    return options


def profile(inputs: Sequence[InputSpec], plan: ShapePlan, size: str) -> str:
    """Returns one end of a TensorRT profile, `name:dimxdim,...` for every input.

    Args:
        inputs: The graph's inputs.
        plan: Its shapes.
        size: `min`, `max`, or `opt`, which is the middle of the plan's lengths and of that length's row counts.
    """
    first, middle, last = plan.buckets[0], plan.buckets[len(plan.buckets) // 2], plan.buckets[-1]
    rows, length = {
        "min": (min(bucket.rows[0] for bucket in plan.buckets), first.length),
        "opt": (middle.rows[len(middle.rows) // 2], middle.length),
        "max": (first.rows[-1], last.length),
    }[size]
    masks = "" if not plan.masks else str({"min": plan.masks[0], "opt": plan.masks[len(plan.masks) // 2], "max": plan.masks[-1]}[size])
    dims = {"mask_index": masks, "lengths": str(rows)}
    return ",".join(f"{spec.name}:{dims.get(spec.fill, f'{rows}x{length}')}" for spec in inputs)


def engine_folder(root: Path, graph: GraphSpec, gpu: Gpu, *, tensorrt: str, onnxruntime: str) -> Path:
    """Returns the folder of a graph's engine and timing caches.

    An engine is good for one graph, one kind of GPU, one version of both libraries, and the shapes that it was built for: each
    has a part in the name, so that a stale engine is never loaded, only left behind.

    Args:
        root: The folder of all engine caches.
        graph: The graph with its plan.
        gpu: The GPU that runs it.
        tensorrt: Version of TensorRT.
        onnxruntime: Version of ONNX Runtime.
    """
    ends = "" if graph.shapes is None else "|".join(profile(graph.inputs, graph.shapes, size) for size in ("min", "opt", "max"))
    shapes = hashlib.sha256(ends.encode()).hexdigest()[:8]
    device = re.sub(r"[^A-Za-z0-9]+", "-", gpu.name).strip("-")
    name = f"{graph.identity[:16]}-{graph.precision}-{shapes}-{device}-sm{gpu.capability}-trt{tensorrt}-ort{onnxruntime}"
    return root / name


def missing(provider: Provider, available: Sequence[str], *, version: str, libraries: Path, load: Load = ctypes.CDLL) -> str | None:
    """Returns what a provider lacks on this machine: the wheel, the driver or a library; None where nothing of these is missing.

    Args:
        provider: The provider.
        available: What the installed onnxruntime was built with.
        version: Its version.
        libraries: The folder of its shared libraries.
        load: Loads a shared library by its name.
    """
    if NAMES[provider] not in available:
        return (
            f"this onnxruntime {version} lacks it (it has {', '.join(available)}); install 'bertserve[gpu]' in place of 'bertserve[cpu]'."
        )
    if provider == "cpu":
        return None
    try:
        first_gpu(load)
    except ProviderError as error:
        return error.message
    try:
        load(str(libraries / _LIBRARIES[provider]))
    except OSError as error:
        return f"a library that it needs is missing ({error}); install it, or add its folder to LD_LIBRARY_PATH."
    return None

"""The execution providers of ONNX Runtime, one record each: the requirements of their sessions, and the graphs that are built for them.

docs/explanation/architecture.md says how to add one.
"""

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from bertserve.service.errors import StartError
from bertserve.service.messages import install_command

if TYPE_CHECKING:
    from bertserve.service.bundle.graph_spec import GraphSpec, InputSpec, Precision, ShapePlan

T = TypeVar("T")
Options = dict[str, str]
TENSORRT_MAJOR = 10  # the version that onnxruntime-gpu links
Provider = Literal["cpu", "cuda", "tensorrt"]
ProviderChoice = Literal["auto", Provider]


class GpuOptions(NamedTuple):
    """Options of a session on a GPU.

    Attributes:
        device_id: Index among the GPUs that the process can use.
        mem_limit_mib: Maximum MiB of the session's arena, which holds its weights and tensors; None for no limit.
        cuda_graphs: Whether its runs are captured as CUDA graphs.
    """

    device_id: int = 0
    mem_limit_mib: int | None = None
    cuda_graphs: bool = False


FIRST_GPU = GpuOptions()


@dataclass(frozen=True)
class ExecutionProvider:
    """An execution provider.

    Attributes:
        name: Its name in flags, settings and manifests.
        ort_name: Its name in ONNX Runtime.
        package: The package that contains it.
        extra: The extra of bertserve that installs the package.
        precisions: The precisions of its graphs; the last one is the default.
        provider_options: Returns its options for a graph's session. The second argument is the folder of engines, or None; the third is how
            it uses the GPU.
        library: The shared library that ONNX Runtime loads for it; None if it needs none, and no GPU.
        fallback: Provider of the operators that this one cannot run; None for the CPU.
        automatic: Whether `auto` uses it if it is available.
        engine_version: Returns the name and version of the compiler of engines, which are stored in files; None if nothing is compiled.
        preload: Loads libraries that the loader does not find by itself; it raises StartError. None if there are none.
        ranges: Number of ranges of lengths, each with its own session, for a provider that compiles a session for one range and reserves
            memory for the longest text in its largest batch. All lengths of a range share the same numbers of rows. 0 for a single session.
    """

    name: Provider
    ort_name: str
    package: str
    extra: str
    precisions: tuple["Precision", ...]
    provider_options: Callable[["GraphSpec", Path | None, GpuOptions], Options]
    library: str | None = None
    fallback: Provider | None = None
    automatic: bool = False
    engine_version: Callable[[], str] | None = None
    preload: Callable[[], Any] | None = None
    ranges: int = 0


def split_into_ranges(lengths: Sequence[T], ranges: int) -> list[Sequence[T]]:
    """Returns at most `ranges` ranges of lengths, all with the same number of lengths, except the last one, which can be shorter."""
    size = -(-len(lengths) // ranges)
    return [lengths[start : start + size] for start in range(0, len(lengths), size)]


def cuda_options(graph: "GraphSpec", engine_cache_dir: Path | None = None, gpu: GpuOptions = FIRST_GPU) -> Options:
    """Returns the options of the CUDA provider; `engine_cache_dir` is not used.

    For fp32, products are computed in full precision: TF32 has a mantissa of 10 bits, but the report was measured with 23.
    """
    options = {
        "device_id": str(gpu.device_id),
        # blocks of powers of two waste up to half of the memory; there are only a few shapes, and the largest is warmed up first
        "arena_extend_strategy": "kSameAsRequested",
        # copies on the computing stream, because one batch runs at a time and nothing can overlap
        "do_copy_in_default_stream": "1",
        "use_tf32": "0" if graph.precision == "fp32" else "1",
        "enable_cuda_graph": "1" if gpu.cuda_graphs else "0",
    }
    if gpu.mem_limit_mib is not None:
        options["gpu_mem_limit"] = str(gpu.mem_limit_mib * 2**20)
    return options


def tensorrt_options(graph: "GraphSpec", engine_cache_dir: Path | None, gpu: GpuOptions = FIRST_GPU) -> Options:
    """Returns the options of the TensorRT provider for a graph with the shape plan of one range.

    The only profile covers these shapes: another shape would build the engine again. The folder is for the caches of this graph's engine.

    Raises:
        StartError: The graph has no shape plan.
    """
    if graph.shapes is None:
        raise StartError(f"`{graph.file}` has no shape plan, and TensorRT needs one; export again with `bert-export --provider tensorrt`.")
    min_shapes, opt_shapes, max_shapes = (profile(graph.inputs, graph.shapes, size) for size in ("min", "opt", "max"))
    options = {
        "device_id": str(gpu.device_id),
        "trt_fp16_enable": "1" if graph.precision == "fp16" else "0",
        "trt_profile_min_shapes": min_shapes,
        "trt_profile_opt_shapes": opt_shapes,
        "trt_profile_max_shapes": max_shapes,
        "trt_engine_cache_enable": "0" if engine_cache_dir is None else "1",
        "trt_timing_cache_enable": "0" if engine_cache_dir is None else "1",
    }
    if engine_cache_dir is not None:
        options |= {"trt_engine_cache_path": str(engine_cache_dir), "trt_timing_cache_path": str(engine_cache_dir)}
    return options


def profile(inputs: Sequence["InputSpec"], plan: "ShapePlan", size: str) -> str:
    """Returns one end of a TensorRT profile, `name:dimxdim,...` for every input.

    `size` is `min`, `max`, or `opt`, the middle of the plan's lengths and of that length's numbers of rows.
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


def load_tensorrt() -> Any:
    """Returns TensorRT's library, after loading both libraries that ONNX Runtime links, from the extra's package or from the system.

    Raises:
        StartError: The version that ONNX Runtime links is missing.
    """
    package = importlib.util.find_spec("tensorrt_libs")  # the loader does not search its folder
    folder = Path(package.origin).parent if package is not None and package.origin is not None else Path()
    try:
        return [ctypes.CDLL(str(folder / f"{name}.so.{TENSORRT_MAJOR}")) for name in ("libnvonnxparser", "libnvinfer")][-1]
    except OSError as error:
        raise StartError(
            f"onnxruntime needs TensorRT {TENSORRT_MAJOR}, not a newer version, and it is not installed ({error}); install the extra "
            f"`tensorrt`: `{install_command('tensorrt')}`."
        ) from error


PROVIDERS: dict[str, ExecutionProvider] = {
    record.name: record
    for record in (
        # on ONNX Runtime, int8 products are slower than float ones with CUDA, and fp16 ones are slower on the CPU
        ExecutionProvider("cpu", "CPUExecutionProvider", "onnxruntime", "cpu", ("fp32", "int8"), lambda graph, engine_cache_dir, gpu: {}),
        ExecutionProvider(
            "cuda",
            "CUDAExecutionProvider",
            "onnxruntime-gpu",
            "gpu",
            ("fp32", "fp16"),
            cuda_options,
            library="libonnxruntime_providers_cuda.so",
            automatic=True,
        ),
        ExecutionProvider(
            "tensorrt",
            "TensorrtExecutionProvider",
            "onnxruntime-gpu",
            "tensorrt",
            ("fp32", "fp16"),
            tensorrt_options,
            library="libonnxruntime_providers_tensorrt.so",
            fallback="cuda",
            engine_version=lambda: f"trt{load_tensorrt().getInferLibVersion()}",
            preload=load_tensorrt,
            ranges=3,  # short, middle and long texts
        ),
    )
}

"""Opens ONNX Runtime sessions on the requested provider, or explains why it is unavailable. Only this module imports onnxruntime."""

import ctypes
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.engine import hardware
from bertserve.service.errors import StartError
from bertserve.service.messages import install_command
from bertserve.service.providers import FIRST_GPU, PROVIDERS, GpuOptions, Options, Provider, profile

try:
    import onnxruntime as ort
except ImportError as error:  # both wheels use this import name, so neither is in the base install
    raise StartError(
        f"ONNX Runtime is not installed: `{install_command('cpu')}`, or `{install_command('gpu')}` on a machine with an NVIDIA GPU."
    ) from error

VERSION: str = ort.__version__
# A graph of one Identity, as onnx.save writes it; other sessions get the same provider as a session on it.
_PROBE = bytes.fromhex(
    "08083a370a100a017812017922084964656e746974791201675a0f0a0178120a0a08080112040a020801620f0a0179120a0a08080112040a02080142040a00100d"
)


def open_session(
    path: Path, graph: GraphSpec, *, provider: Provider, threads: int = 1, engine_cache: Path | None = None, gpu: GpuOptions = FIRST_GPU
) -> Any:
    """Returns an `onnxruntime.InferenceSession` for an ONNX file, whose runs use `threads` threads, or `RangeSessions` with its `run`.

    `engine_cache` is the folder of compiled engines, if the provider compiles; None to build them at every start. `gpu` are the
    options of a session on a GPU.

    Raises:
        StartError: This onnxruntime lacks the provider, or the session did not get it; the message says what is missing.
    """
    if graph.shapes is not None and (count := PROVIDERS[provider].ranges):
        graphs = [graph.model_copy(update={"shapes": plan}) for plan in graph.shapes.split(count)]
        return RangeSessions(graphs, [_open(path, part, provider, threads=threads, engine_cache=engine_cache, gpu=gpu) for part in graphs])
    return _open(path, graph, provider, threads=threads, engine_cache=engine_cache, gpu=gpu)


class RangeSessions:
    """The sessions of a graph for ranges of lengths. A batch runs in the session of its length."""

    def __init__(self, graphs: Sequence[GraphSpec], sessions: Sequence[Any]) -> None:
        """Combines the sessions of ranges of lengths, the shortest first; each graph has the shapes of its range."""
        self._ids = next(spec.name for spec in graphs[0].inputs if spec.fill == "token_ids")
        lengths = [[bucket.length for bucket in graph.shapes.buckets] for graph in graphs if graph.shapes is not None]
        self._sessions = {length: session for part, session in zip(lengths, sessions, strict=True) for length in part}

    def run(self, names: Sequence[str], feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the outputs of a run in a planned length, like `InferenceSession.run`."""
        return self._sessions[feed[self._ids].shape[1]].run(names, feed)


def _open(path: Path, graph: GraphSpec, provider: Provider, *, threads: int, engine_cache: Path | None, gpu: GpuOptions) -> Any:
    """Returns an `onnxruntime.InferenceSession`; for its arguments and errors, see `open_session`."""
    ort_name = PROVIDERS[provider].ort_name
    if ort_name in ort.get_available_providers():
        options = session_options(threads)
        if graph.has_attentions:
            # By default, nodes that only an output needs run last, so that the attention of all layers is in memory together: 600 MB for 4
            # texts of 512 tokens with 12 heads in 12 layers. In the graph's own order, each layer's attention is freed before the next one.
            options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        providers = _provider_options(provider, graph, engine_cache, gpu)
        try:
            session = _session(str(path), provider, providers, options)
        except Exception as error:  # onnxruntime's pybind exceptions share no base class but Exception
            raise StartError(f"onnxruntime {VERSION} cannot load `{path}`: {error}") from error
        if ort_name in session.get_providers():
            return session
    raise StartError(f"`{path}` needs {ort_name}: {missing(provider, gpu.device_id)} Alternatively, choose another --provider.")


def available_provider() -> Provider:
    """Returns the provider for `auto`: the automatic one that this onnxruntime supports, otherwise the CPU."""
    available = ort.get_available_providers()
    return next((record.name for record in PROVIDERS.values() if record.automatic and record.ort_name in available), "cpu")


def unavailable_reason(provider: Provider, device_id: int = 0) -> str | None:
    """Returns why sessions on this machine do not get a provider on a GPU, or None if they do; it opens a session on a tiny graph."""
    name = PROVIDERS[provider].ort_name
    if name in ort.get_available_providers():
        try:
            options = {} if provider == "cpu" else {"device_id": str(device_id)}
            if name in _session(_PROBE, provider, [(name, options)], session_options(threads=1)).get_providers():
                return None
        except Exception as error:  # noqa: BLE001 - onnxruntime's pybind exceptions share no base class but Exception
            return f"{missing(provider, device_id)} onnxruntime says: {error}"
    return missing(provider, device_id)


def graph_cache_dir(root: Path, graph: GraphSpec, gpu: tuple[str, str], *, compiler: str) -> Path:
    """Returns the folder of a graph's engine and timing caches.

    An engine is valid for one graph, one kind of GPU, one version of both libraries, and the shapes for which it was built. The
    name contains each of them, so that an outdated engine stays on disk but is never loaded. `gpu` is the name and the compute
    capability of the GPU, and `compiler` the name and version of the compiler.
    """
    ends = "" if graph.shapes is None else "|".join(profile(graph.inputs, graph.shapes, size) for size in ("min", "opt", "max"))
    shapes = hashlib.sha256(ends.encode()).hexdigest()[:8]
    name, capability = gpu
    device = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    return root / f"{graph.identity[:16]}-{graph.precision}-{shapes}-{device}-sm{capability}-{compiler}-ort{VERSION}"


def missing(provider: Provider, device_id: int = 0) -> str:
    """Returns what a provider lacks on this machine: the wheel, the driver, the GPU or a library; or what to check if all are available."""
    record, available = PROVIDERS[provider], ort.get_available_providers()
    if record.ort_name not in available:
        return (
            f"this onnxruntime {VERSION} lacks it (it has {', '.join(available)}); run `pip uninstall onnxruntime`, then install the extra "
            f"`{record.extra}`: `{install_command(record.extra)}`."
        )
    try:
        hardware.find_gpu(device_id)
        if record.preload is not None:
            record.preload()
        ctypes.CDLL(str(Path(ort.__file__).parent / "capi" / (record.library or "")))
    except StartError as error:
        return error.message
    except OSError as error:
        return f"a library that it needs is missing ({error}); install it, or add its folder to LD_LIBRARY_PATH."
    return "driver and libraries are installed, so check what onnxruntime logs when it loads them."


def new_tensor(like: NDArray[Any], device: tuple[str, int]) -> Any:
    """Returns an `onnxruntime.OrtValue` on a device, given by name and index, with the shape and type of an array."""
    return ort.OrtValue.ortvalue_from_shape_and_type(like.shape, like.dtype.type, *device)


def run_options(graph_id: int) -> Any:
    """Returns the options of a run that is captured as the CUDA graph with this id, or of one that is not captured, for -1."""
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    return options


def _provider_options(provider: Provider, graph: GraphSpec, engine_cache: Path | None, gpu: GpuOptions) -> list[tuple[str, Options]]:
    """Returns the providers of a session with their options, in order of preference."""
    record, engine_cache_dir = PROVIDERS[provider], None
    if engine_cache is not None and record.engine_version is not None:
        engine_cache_dir = graph_cache_dir(engine_cache, graph, hardware.find_gpu(gpu.device_id), compiler=record.engine_version())
        try:
            engine_cache_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"--engine-cache `{engine_cache}` cannot be written ({error.strerror}); give another folder.") from error
    fallbacks = [] if record.fallback is None else _provider_options(record.fallback, graph, None, gpu)
    return [(record.ort_name, record.provider_options(graph, engine_cache_dir, gpu)), *fallbacks]


def _session(model: str | bytes, provider: Provider, providers: Sequence[tuple[str, Options]], options: Any) -> Any:
    if provider != "cpu":
        ort.preload_dlls()  # CUDA and cuDNN from their wheels, if the system has none
    if (preload := PROVIDERS[provider].preload) is not None:
        with suppress(StartError):  # `missing` reports it
            preload()
    # onnxruntime's fallback is disabled, because it would only print that a session uses another provider
    return ort.InferenceSession(model, options, providers=list(providers), enable_fallback=0)


def session_options(threads: int) -> Any:
    """Returns the options of a session with this number of threads for each run."""
    options = ort.SessionOptions()
    # The default uses every core of the host and spins between runs.
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Inference threads share a session. The buffers of its arena are spread over memory, so over minutes it is up to a third slower than
    # malloc, which has a heap per thread and reuses recently freed memory that is still in the cache.
    options.enable_cpu_mem_arena = False
    # The pattern cache would keep memory for every shape, and there are very many lengths.
    options.enable_mem_pattern = False
    # The exporter chose the operators by measurements; the extended level would fuse some of them into slower ones.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    return options

"""OnnxEngine: a graph in an ONNX Runtime session. It pads, runs and un-pads tensors, without texts, tasks or queues.

A graph with a shape plan runs only in planned shapes: rows are padded to a planned length, and batches are filled up to a planned
number of rows. The outputs of additional rows are dropped.
"""

import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bertserve.service.bundle.graph_spec import GraphSpec, InputSpec, Outputs, OutputSpec
from bertserve.service.engine.cuda_graphs import CudaGraphSession
from bertserve.service.engine.sessions import open_session
from bertserve.service.errors import DeviceLostError, EngineError
from bertserve.service.providers import FIRST_GPU, GpuOptions, Provider
from bertserve.service.text.tokenizer import Encoding

Feed = dict[str, NDArray[np.int32 | np.int64]]

# Messages of onnxruntime, the C++ library and CUDA, which define no error types for them.
_OUT_OF_MEMORY = ("bad_alloc", "bad allocation", "failed to allocate memory", "out of memory")
# CUDA errors after which every call of the process fails: a kernel has read or written a wrong address or failed otherwise, an assertion
# failed, memory has an error that cannot be corrected, or the card does not answer.
_DEVICE_LOST = re.compile(
    r"cuda (?:failure|error) (?:214|220|70[029]|71[04-9]|999)\b|illegal memory access|misaligned address|unspecified launch failure"
    r"|device-side assert|uncorrectable|context is destroyed|device (?:is )?lost|fallen off the bus",
    re.IGNORECASE,
)


class OnnxEngine:
    """One graph, `graph`, in one session, shared by all inference threads: `run` is thread-safe and releases the GIL while it computes."""

    def __init__(
        self,
        path: Path,
        graph: GraphSpec,
        *,
        pad_id: int,
        padding_side: Literal["left", "right"],
        provider: Provider | None = None,
        engine_cache: Path | None = None,
        threads: int = 1,
        gpu: GpuOptions = FIRST_GPU,
    ) -> None:
        """Opens the session of an ONNX file, with the arguments and errors of `open_session`; by default on the graph's own provider.

        With `gpu.cuda_graphs`, an fp16 graph on CUDA also opens a session for each thread that calls `warm_up`.
        """
        provider = provider or graph.provider
        open_graph = partial(open_session, path, graph, provider=provider, threads=threads, engine_cache=engine_cache)
        self._session = open_graph(gpu=gpu._replace(cuda_graphs=False))
        self._cuda_graphs: CudaGraphSession | None = None
        if gpu.cuda_graphs and provider == "cuda":
            # needed for graphs that are not captured too: their runs must not disturb a capture
            captures = graph.precision == "fp16" and not graph.has_attentions
            self._session = self._cuda_graphs = CudaGraphSession(
                self._session, partial(open_graph, gpu=gpu) if captures else None, ("cuda", gpu.device_id)
            )
        self.graph = graph
        self._pad_id = pad_id
        self._left = padding_side == "left"
        self._mask_counts = () if graph.shapes is None else graph.shapes.masks

    def run(self, encodings: Sequence[Encoding], *, small_outputs: bool = False) -> list[Outputs]:
        """Runs one batch of at least one encoding, padded to its longest text.

        Returns:
            For each encoding, its outputs by name, float32, without padding; with `small_outputs` the small ones, if there are any.
            Their shapes are [values] for `per_text`, [length, ...] for `per_token`, [masks, values] for `per_mask`, and
            [maps, length, length] for `per_map`, which is omitted without maps.

        Raises:
            EngineError: The graph failed, or an output has a wrong number of rows or is not finite.
            DeviceLostError: The GPU failed, so no later run can succeed.
        """
        rows, longest = len(encodings), max(len(encoding.ids) for encoding in encodings)
        shape = self.graph.padded_shape(rows, longest)
        if shape is None:  # more rows than in any planned batch
            halves = (encodings[: rows // 2], encodings[rows // 2 :])
            return [row for half in halves for row in self.run(half, small_outputs=small_outputs)]
        rows, longest = shape
        specs = (small_outputs and self.graph.small_outputs) or self.graph.outputs
        try:
            inputs = build_feed(encodings, self.graph.inputs, shape, pad_id=self._pad_id, left=self._left, mask_counts=self._mask_counts)
            outputs = self._session.run([spec.name for spec in specs], inputs)
        except Exception as error:  # onnxruntime's pybind exceptions share no base class but Exception
            raise _run_error(error, rows, longest) from error
        results: list[Outputs] = [{} for _ in encodings]
        for spec, raw in zip(specs, outputs, strict=True):
            # converted after the copy from the GPU, which is half as large in fp16
            output = raw.astype(np.float32) if raw.dtype == np.float16 else raw
            if not np.isfinite(output).all():
                raise EngineError("output `{name}` is not finite; this graph cannot score this text.", name=spec.name)
            for result, part in zip(results, self._split(spec, output, encodings, rows), strict=True):
                if part is not None:
                    result[spec.name] = part
        return results

    def _split(
        self, spec: OutputSpec, output: NDArray[np.float32], encodings: Sequence[Encoding], rows: int
    ) -> Sequence[NDArray[np.float32] | None]:
        """Returns each encoding's part of an output, without padding and additional rows; None for an encoding that does not request it."""
        expected = rows
        if spec.kind == "per_mask":
            masks = sum(len(encoding.masks) for encoding in encodings)
            expected = _planned(masks, self._mask_counts)
        elif spec.kind == "per_map":
            maps = _maps(encodings)
            expected = len(maps)
        if len(output) != expected:
            raise EngineError(
                "output `{name}` has {output_count} rows instead of {expected}. This is a bug.",
                name=spec.name,
                output_count=len(output),
                expected=expected,
            )
        if spec.kind == "per_text":
            return list(output[: len(encodings)])
        if spec.kind == "per_token":
            longest = output.shape[1]
            return [row[_token_slice(encoding, longest, self._left)] for row, encoding in zip(output, encodings, strict=False)]
        if spec.kind == "per_map":
            owners = np.array([row for _, row, _ in maps])
            spans = [_token_slice(encoding, output.shape[1], self._left) for encoding in encodings]
            return [output[owners == i][:, span, span] if encodings[i].maps else None for i, span in enumerate(spans)]
        ends = np.cumsum([len(encoding.masks) for encoding in encodings])
        return np.split(output[:masks], ends[:-1])

    def time_runs(self, shapes: Sequence[tuple[int, int]], *, repeats: int) -> list[tuple[int, int, float]]:
        """Warms up on dummy batches and times them, for the cost model; the fastest of `repeats` runs counts, so the first can be slow.

        Returns:
            `(rows, length, seconds)` for each shape.
        """
        fastest = [inf] * len(shapes)
        # in rounds, so that changes in the machine's speed affect all shapes
        for _ in range(repeats):
            for i, (rows, length) in enumerate(shapes):
                zeros = np.zeros(length, dtype=np.int64)
                batch = [Encoding(zeros, zeros, masks=(length - 1,))] * rows
                start = time.perf_counter()
                self.run(batch, small_outputs=True)
                fastest[i] = min(fastest[i], time.perf_counter() - start)
        return [(rows, length, seconds) for (rows, length), seconds in zip(shapes, fastest, strict=True)]

    def warm_up(self, rows: int, length: int) -> None:
        """Runs a dummy batch on the calling thread. With CUDA graphs, it also captures the run for this thread."""
        with nullcontext() if self._cuda_graphs is None else self._cuda_graphs.capturing():
            self.time_runs([(rows, length)], repeats=1)


def build_feed(
    encodings: Sequence[Encoding],
    inputs: Iterable[InputSpec],
    shape: tuple[int, int],
    *,
    pad_id: int = 0,
    left: bool = False,
    mask_counts: Sequence[int] = (),
) -> Feed:
    """Returns the inputs of a run of at least one encoding by name, as in their InputSpec.

    `shape` is the rows to which the batch is filled up, and the length to which they are padded; `mask_counts` are the planned numbers of
    masks, ascending.
    """
    rows, longest = shape
    batch = encodings
    if rows > len(encodings):
        # repeats a text, because the scores of a row with only padding can be not finite; without its masks, which are counted
        batch = [*encodings, *[Encoding(encodings[0].ids, encodings[0].type_ids)] * (rows - len(encodings))]
    token_slices = [_token_slice(encoding, longest, left) for encoding in batch]
    values: Feed = {}
    for spec in inputs:
        if spec.fill == "mask_index":
            flat = [i * longest + token_slices[i].start + mask for i, encoding in enumerate(encodings) for mask in encoding.masks]
            flat += flat[:1] * (_planned(len(flat), mask_counts) - len(flat))
            values[spec.name] = np.array(flat, dtype=spec.dtype)
        elif spec.fill == "lengths":
            values[spec.name] = np.array([len(encoding.ids) for encoding in batch], dtype=spec.dtype)
        elif spec.fill == "attention_index":
            values[spec.name] = np.array(_maps(encodings), dtype=spec.dtype).reshape(-1, 3)
        else:
            padded = values[spec.name] = np.full((rows, longest), pad_id if spec.fill == "token_ids" else 0, dtype=spec.dtype)
            for row, token_slice, encoding in zip(padded, token_slices, batch, strict=True):
                if spec.fill == "token_ids":
                    row[token_slice] = encoding.ids
                elif spec.fill == "type_ids":
                    row[token_slice] = encoding.type_ids
                else:
                    row[token_slice] = 1
    return values


def _planned(masks: int, counts: Sequence[int]) -> int:
    """Returns the next planned number of masks, if numbers are planned."""
    i = bisect_left(counts, masks)
    return counts[i] if i < len(counts) else masks


def _token_slice(encoding: Encoding, longest: int, left: bool) -> slice:
    """Returns the positions of an encoding's tokens in a row that is padded to `longest`."""
    length = len(encoding.ids)
    return slice(longest - length, longest) if left else slice(0, length)


def _maps(encodings: Sequence[Encoding]) -> list[tuple[int, int, int]]:
    """Returns layer, row and head of each requested attention map, in the order of the graph's output."""
    return sorted((layer, row, head) for row, encoding in enumerate(encodings) for layer, head in encoding.maps)


def _run_error(error: Exception, rows: int, longest: int) -> EngineError | DeviceLostError:
    """Returns the error of a failed run, without the library's message, which can contain a caller's ids."""
    if lost := _DEVICE_LOST.search(str(error)):
        return DeviceLostError(f"the GPU failed ({lost[0]}), and the process must be restarted; if that repeats, check `nvidia-smi`.")
    if isinstance(error, MemoryError) or any(phrase in str(error).lower() for phrase in _OUT_OF_MEMORY):
        return EngineError(
            "there is not enough memory to run {rows} x {longest} tokens; send shorter texts; the operator can "
            "give the service more memory.",
            rows=rows,
            longest=longest,
        )
    return EngineError("the graph failed with {kind}.", kind=type(error).__name__)

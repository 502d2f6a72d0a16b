"""Rewrites the tables of inference time in bench/results: `python -m bertserve.bench.inference_time`.

The tables have BERT encoders with random weights by length and precision, and by layers, heads and hidden size.

A time is the median CPU time on one thread. Compared graphs run in turn, so that other load on the machine affects all of them. Graphs are
created as at export. Other modules must not import this one, because it needs torch.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import transformers
from numpy.typing import NDArray

from bertserve.export import cpu, onnx_trace
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.int8.quantize import quantize
from bertserve.export.progress import stage
from bertserve.service.bundle.graph_spec import InputSpec
from bertserve.service.engine.sessions import session_options

ROOT = Path(__file__).resolve().parent.parent
PAGE = "2026-11-23-inference-time.md"
SHAPES = "12,12,768 3,12,768 6,12,768 12,1,768 12,3,768 12,6,768 12,24,768 12,3,192 12,6,384"
PRECISIONS = ("fp32", "int8")
BATCH = 4  # texts
Run = Callable[[NDArray[np.int64]], object]  # runs a graph on a batch of token ids: [texts, length]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, and rewrites the tables in the folder of results."""
    parser = argparse.ArgumentParser(description="Rewrite the tables of inference time in bench/results.")
    parser.add_argument("--shapes", default=SHAPES, help="layers,heads,hidden size of each encoder; others are compared with the first")
    parser.add_argument("--lengths", default="16,64,128,256,512", help="tokens of the texts; shapes are compared at the middle one")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of the runs of each graph and length (default: 4)")
    parser.add_argument("--results", type=Path, default=ROOT / "bench/results", help="folder of the page (default: bench/results)")
    args = parser.parse_args(argv)
    shapes = [tuple(map(int, shape.split(","))) for shape in args.shapes.split()]
    lengths, graphs = sorted(map(int, args.lengths.split(","))), build_encoder(*shapes[0])
    write_table(args.results / PAGE, "lengths", length_rows(shapes[0], graphs, lengths, args.seconds))
    write_table(args.results / PAGE, "shapes", shape_rows(shapes, graphs, lengths[len(lengths) // 2], args.seconds))


def write_table(page: Path, name: str, rows: Iterable[Sequence[str]]) -> None:
    """Replaces the table between the comments with this name; the first row is the head."""
    head, *body = rows
    table = "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))
    begin, end = f"<!-- written by bench/inference_time.py: {name} -->\n", "<!-- end of written -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(before + begin + table + end + rest.partition(end)[2], encoding="utf-8")


def open_graph(path: Path, inputs: Sequence[InputSpec]) -> Run:
    """Returns a graph on one thread; its files are not needed after it is loaded."""
    session = ort.InferenceSession(str(path), session_options(1), providers=["CPUExecutionProvider"])
    return lambda ids: session.run(None, make_feed(inputs, ids))


def make_feed(inputs: Sequence[InputSpec], ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Returns a graph's inputs for a batch of token ids without padding: [texts, length]."""
    values = {"token_ids": ids, "attention_mask": np.ones_like(ids), "type_ids": np.zeros_like(ids)}
    return {spec.name: values[spec.fill].astype(spec.dtype) for spec in inputs}


def cpu_ms(runs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Returns the median CPU milliseconds of each run without its first time; on average, each has `seconds` in total."""
    times: list[list[float]] = [[] for _ in runs]
    end = time.monotonic() + seconds * len(runs)
    while len(times[0]) <= 3 or time.monotonic() < end:
        for run, measured in zip(runs, times, strict=True):
            start = time.thread_time()
            run()
            measured.append(1000 * (time.thread_time() - start))
    return [statistics.median(measured[1:]) for measured in times]


def random_ids(texts: int, length: int) -> NDArray[np.int64]:
    """Returns random token ids: [texts, length]."""
    return np.random.default_rng(0).integers(1000, 1100, (texts, length))


def gflop(shape: Sequence[int], length: int) -> float:
    """Returns the operations of a text of `length` tokens in 10^9: matrices, and attention."""
    layers, _, hidden = shape
    return layers * (24 * hidden**2 * length + 4 * hidden * length**2) / 1e9


def build_encoder(layers: int, heads: int, hidden: int) -> dict[str, Run]:
    """Returns the graph of a BERT encoder in each precision. Its weights are random, which does not change the time of a run."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    with tempfile.TemporaryDirectory() as name, stage("build", f"{layers} layers, {heads} heads, hidden size {hidden}"):
        folder = Path(name)
        transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
        shutil.copy(ROOT / "models/sentiment/tokenizer.json", folder)
        checkpoint = load_checkpoint(str(folder), LoadOptions(task="feature-extraction"))
        inputs, description = onnx_trace.trace(checkpoint, folder / "raw.onnx")
        cpu.optimize(folder / "raw.onnx", folder / "fp32.onnx", replace(checkpoint, inputs=inputs), description)
        feeds = [make_feed(inputs, random_ids(1, 16))] * 16
        quantize(folder / "fp32.onnx", folder / "int8.onnx", folder, feeds, feeds, max_error=inf)
        return {precision: open_graph(folder / f"{precision}.onnx", inputs) for precision in PRECISIONS}


def length_rows(shape: Sequence[int], graphs: dict[str, Run], lengths: Sequence[int], seconds: float) -> Iterable[Sequence[str]]:
    """Yields the head, and a row for each length in tokens."""
    columns = [f"{precision}, {texts}" for precision in PRECISIONS for texts in ("one text", f"per text of a batch of {BATCH}")]
    yield ["tokens", "GFLOP", *columns, "int8 / fp32, one text"]
    for length in lengths:
        runs = [partial(graphs[precision], random_ids(texts, length)) for precision in PRECISIONS for texts in (1, BATCH)]
        fp32, fp32_batch, int8, int8_batch = cpu_ms(runs, seconds)
        times = [fp32, fp32_batch / BATCH, int8, int8_batch / BATCH]
        yield [str(length), f"{gflop(shape, length):.1f}", *(f"{ms:.1f}" for ms in times), f"{int8 / fp32:.2f}"]


def shape_rows(shapes: Sequence[Sequence[int]], graphs: dict[str, Run], length: int, seconds: float) -> Iterable[Sequence[str]]:
    """Yields the head, and a row for each shape: its operations and CPU times for one text, divided by those of the first."""
    yield ["layers", "heads", "hidden size", "GFLOP ratio", *PRECISIONS]
    yield [*map(str, shapes[0]), "1", "1", "1"]
    for shape in shapes[1:]:
        variant, ratios = build_encoder(*shape), [gflop(shape, length) / gflop(shapes[0], length)]
        for precision in PRECISIONS:
            base_ms, ms = cpu_ms([partial(one[precision], random_ids(1, length)) for one in (graphs, variant)], seconds)
            ratios.append(ms / base_ms)
        yield [*map(str, shape), *(f"{ratio:.2f}" for ratio in ratios)]


if __name__ == "__main__":
    main()

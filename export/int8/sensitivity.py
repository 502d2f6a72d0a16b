"""How much the quantization of each layer, alone, moves the model's outputs.

What quantization does to a layer's output is computed apart, and put into a run of the model as an input. So one session measures all
layers: no graph is written, and no session opened, for a layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from bertserve.export import inference, progress
from bertserve.export.graph import rewrite
from bertserve.export.graph.rewrite import Floats, Linear
from bertserve.export.inference import Feed
from bertserve.export.int8.gptq import column_blocks
from bertserve.export.int8.smoothquant import QuantParams
from bertserve.export.progress import track

# A run of the model for each layer takes long. So texts are short, the shortest of those that have as many tokens, from each of so many parts
# of the texts, for single texts come before pairs; and a layer that is far from all limits after a few of them is not measured on the others.
FEW, MIN_TOKENS, PARTS = 8, 16, 8
FAR = 4
# What the products of all runs may cost, in multiplications and additions, within these numbers of texts.
FLOPS = 2e12
LEAST, MOST = 16, 64


def measure(
    model: ir.Model, params: Mapping[str, QuantParams], path: Path, feeds: Sequence[Feed], *, limits: Sequence[float]
) -> dict[str, float]:
    """Returns how much the quantization of each tensor, with the matrix that reads it, moves the model's outputs.

    That is the square of their relative error where nothing else is quantized, over the average of all tensors. (Among other layers in
    int8 it cannot be told: a small change makes these round otherwise, and that moves the outputs by as much.)

    Args:
        model: The float32 model.
        params: How the layers to measure are quantized, by the tensor that they read.
        path: A file for a graph.
        feeds: The calibration texts as the graph's inputs.
        limits: What the results will be compared with.
    """
    layers = rewrite.find_linears(model.graph).values()
    texts = _short(feeds, FLOPS / len(params) / (2 * sum(math.prod(layer.shape) for layer in layers)))
    graph = _ShiftedGraph(model, path)
    found = _measure(graph, params, texts[:FEW])
    average = max(sum(found.values()) / len(found), 1e-12)
    near = [x for x, error in found.items() if any(1 / FAR < error / average / limit < FAR for limit in limits)]
    others = _measure(graph, {x: params[x] for x in near}, texts[FEW:]) if texts[FEW:] else {}
    found |= {x: (found[x] * FEW + error * (len(texts) - FEW)) / len(texts) for x, error in others.items()}
    average = max(sum(found.values()) / len(found), 1e-12)
    return {x: error / average for x, error in found.items()}


class _ShiftedGraph:
    """A model in which something may be added to what each linear layer gives out."""

    def __init__(self, model: ir.Model, path: Path) -> None:
        """Writes the graph and opens a session.

        Args:
            model: The float32 model.
            path: A file for the graph.
        """
        self.linears = rewrite.find_linears(model.graph)
        self._outputs = [str(value.name) for value in model.graph.outputs]
        shifted = model.clone()
        for x, layer in rewrite.find_linears(shifted.graph).items():
            shift = ir.val(_shift(x), dtype=ir.DataType.FLOAT)
            shifted.graph.inputs.append(shift)
            rewrite.add_to_output(shifted.graph, layer.nodes[-1], ir.tape.Tape(), shift)
        rewrite.save(shifted, path, outputs=list(self.linears))
        self._session = inference.open_session(path, threads=1)

    def inputs(self, batches: Sequence[Feed]) -> list[dict[str, Floats]]:
        """Returns what each linear layer reads in each batch."""
        names = list(self.linears)
        runs = inference.run(self._session, [self._with({}, batch) for batch in batches], names)
        return [dict(zip(names, values, strict=True)) for values in runs]

    def outputs(self, batches: Sequence[Feed], x: str | None = None, changes: Sequence[Floats] | None = None) -> list[NDArray[Any]]:
        """Returns the model's outputs over all batches, flattened.

        Args:
            batches: The inputs.
            x: The tensor that a layer reads.
            changes: What is added to that layer's output in each batch.
        """
        shifts: Sequence[Feed] = [{} for _ in batches] if x is None or changes is None else [{_shift(x): change} for change in changes]
        return inference.flat(
            [self._session.run(self._outputs, self._with(shift, batch)) for shift, batch in zip(shifts, batches, strict=True)]
        )

    def _with(self, shift: Feed, batch: Feed) -> dict[str, NDArray[Any]]:
        zero = np.zeros(1, dtype=np.float32)
        return {**batch, **{_shift(x): zero for x in self.linears}, **shift}


def _measure(graph: _ShiftedGraph, params: Mapping[str, QuantParams], texts: Sequence[Feed]) -> dict[str, float]:
    """Returns the square of the outputs' relative error for each layer alone in int8."""
    batches = inference.batches(texts)
    expected, inputs = graph.outputs(batches), graph.inputs(batches)

    def error(x: str) -> float:
        changes = _changes(graph.linears[x], params[x], [values[x] for values in inputs])
        return inference.relative_error(expected, graph.outputs(batches, x, changes)) ** 2

    found = track(progress.each(error, params), "measure sensitivity", unit="matrices", total=len(params))
    return dict(zip(params, found, strict=True))


def _changes(layer: Linear, quant: QuantParams, inputs: Sequence[Floats]) -> list[Floats]:
    """Returns what a layer gives out in int8 less what it gives out in float, for each of its inputs, float32 [..., outputs]."""
    weight, bias = layer.arrays()
    rows = np.concatenate([x.reshape(-1, x.shape[-1]) for x in inputs])
    stored = quant.dequantized(rows)
    change = np.empty((len(rows), weight.shape[1]), dtype=np.float32)
    for part in column_blocks(weight.shape[1]):
        change[:, part] = stored @ (quant.weight[:, part] * quant.weight_scale[part]) - rows @ weight[:, part] + (quant.bias - bias)[part]
    ends = np.cumsum([x.size // x.shape[-1] for x in inputs])
    return [part.reshape(*x.shape[:-1], -1) for x, part in zip(inputs, np.split(change, ends[:-1]), strict=True)]


def _short(feeds: Sequence[Feed], tokens: float) -> list[Feed]:
    """Returns the texts that layers are measured on, mixed: of about so many tokens, but no fewer than `LEAST` and no more than `MOST`."""
    enough = [feed for feed in feeds if inference.tokens(feed) >= MIN_TOKENS] or sorted(feeds, key=inference.tokens)[::-1]
    bounds = [i * len(enough) // PARTS for i in range(PARTS + 1)]
    parts = [sorted(enough[start:end], key=inference.tokens) for start, end in itertools.pairwise(bounds)]
    short = [feed for row in itertools.zip_longest(*parts) for feed in row if feed is not None]
    count = int(np.clip(tokens / np.mean([inference.tokens(feed) for feed in short[:PARTS]]), LEAST, MOST))
    return [short[:count][i] for i in np.random.default_rng(0).permutation(min(count, len(short)))]


def _shift(x: str) -> str:
    return f"{x}/shift"

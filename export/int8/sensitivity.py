"""Measures how much the quantization of each layer changes the model's outputs.

The effect of quantization on a layer's output is computed separately, and is an input of a model run. So a single session measures all
layers, without writing a graph or opening a session per layer.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from bertserve.export import inference
from bertserve.export.graph import rewrite
from bertserve.export.graph.rewrite import Linear
from bertserve.export.inference import Feed
from bertserve.export.int8.gptq import LayerParams
from bertserve.export.int8.scales import blocks
from bertserve.export.progress import parallel_map
from bertserve.service.tasks.decoding import Floats

_PERTURBATION = "/shift"  # end of the name of an input that is added to a layer's output
FIRST_TEXTS = 8  # a layer whose error on these is not within a factor of four of a limit is not measured on the others


def measure_sensitivity(
    model: ir.Model, params: Mapping[str, LayerParams], path: Path, feeds: Sequence[Feed], *, limits: Sequence[float]
) -> dict[str, float]:
    """Returns the effect of quantizing each tensor, with the matrix that reads it, on the model's outputs.

    It is the square of their relative error if nothing else is quantized, relative to the average of all tensors. (With other layers in
    int8 it cannot be measured: a small change alters their rounding, which changes the outputs by as much.) It writes a graph to `path`.
    `limits` are the values to which the results will be compared.
    """
    if not params:
        return {}
    layers = rewrite.linears_by_input(model.graph).values()
    flops_per_token = 2 * sum(math.prod(layer.shape) for layer in layers)
    feeds = choose_feeds(feeds, 2e12 / len(params) / flops_per_token)  # about 2e12 operations in all runs
    session = _perturbed_session(model, path)
    errors = _measure(session, model, params, feeds[:FIRST_TEXTS])
    average = max(sum(errors.values()) / len(errors), 1e-12)
    candidates = [tensor for tensor, error in errors.items() if any(1 / 4 < error / average / limit < 4 for limit in limits)]
    if later_feeds := feeds[FIRST_TEXTS:]:
        for tensor, error in _measure(session, model, {tensor: params[tensor] for tensor in candidates}, later_feeds).items():
            errors[tensor] = (errors[tensor] * FIRST_TEXTS + error * len(later_feeds)) / len(feeds)
    average = max(sum(errors.values()) / len(errors), 1e-12)
    return {tensor: error / average for tensor, error in errors.items()}


def _perturbed_session(model: ir.Model, path: Path) -> Any:
    """Returns a session of the model that also returns the inputs of all linear layers, and adds an input to the output of each."""
    perturbed = model.clone()
    linears = rewrite.linears_by_input(perturbed.graph)
    for tensor, layer in linears.items():
        perturbation = ir.val(f"{tensor}{_PERTURBATION}", dtype=ir.DataType.FLOAT)
        perturbed.graph.inputs.append(perturbation)
        rewrite.add_to_output(perturbed.graph, layer.nodes[-1], ir.tape.Tape(), perturbation)
    rewrite.save(perturbed, path, outputs=list(linears))
    return inference.open_cpu_session(path, threads=1)


def _measure(session: Any, model: ir.Model, params: Mapping[str, LayerParams], feeds: Sequence[Feed]) -> dict[str, float]:
    """Returns the square of the outputs' relative error for each layer, with only this layer in int8."""
    linears = rewrite.linears_by_input(model.graph)
    zeros = {f"{tensor}{_PERTURBATION}": np.zeros(1, dtype=np.float32) for tensor in linears}
    batches = [{**zeros, **batch} for batch in inference.batch_by_length(feeds)]
    output_names, names = [str(value.name) for value in model.graph.outputs], list(linears)
    expected = inference.concatenate_runs(inference.run_each(session, batches, output_names))
    inputs = [dict(zip(names, values, strict=True)) for values in inference.run_each(session, batches, names)]

    def error(tensor: str) -> float:
        changes = _changes(linears[tensor], params[tensor], [values[tensor] for values in inputs])
        name = f"{tensor}{_PERTURBATION}"
        runs = [session.run(output_names, batch | {name: change}) for batch, change in zip(batches, changes, strict=True)]
        return inference.rms_error(expected, inference.concatenate_runs(runs)) ** 2

    return dict(zip(params, parallel_map(error, params, "measure sensitivity", unit="matrices"), strict=True))


def _changes(layer: Linear, quant: LayerParams, inputs: Sequence[Floats]) -> list[Floats]:
    """Returns a layer's output in int8 minus its output in float, for each of its inputs, float32 [..., outputs]."""
    weight, bias = layer.arrays()
    rows = np.concatenate([x.reshape(-1, x.shape[-1]) for x in inputs])
    approximated = quant.input_params.dequantized(rows)
    change = np.empty((len(rows), weight.shape[1]), dtype=np.float32)
    for block in blocks(weight.shape[1]):
        int8_outputs = approximated @ (quant.weight[:, block] * quant.weight_scale[block])
        change[:, block] = int8_outputs - rows @ weight[:, block] + (quant.bias - bias)[block]
    ends = np.cumsum([x.size // x.shape[-1] for x in inputs])
    return [part.reshape(*x.shape[:-1], -1) for x, part in zip(inputs, np.split(change, ends[:-1]), strict=True)]


def choose_feeds(feeds: Sequence[Feed], tokens: float) -> list[Feed]:
    """Returns 16 to 64 texts, of about `tokens` tokens in total, in random order.

    A model run per layer takes long. Therefore texts are short: the shortest with at least 16 tokens from each of eight groups of
    neighbors, because single texts precede pairs.
    """
    candidates = [feed for feed in feeds if inference.token_count(feed) >= 16] or sorted(feeds, key=inference.token_count)[::-1]
    bounds = [i * len(candidates) // 8 for i in range(9)]
    groups = [sorted(candidates[start:end], key=inference.token_count) for start, end in itertools.pairwise(bounds)]
    shortest = [feed for row in itertools.zip_longest(*groups) for feed in row if feed is not None]
    mean_tokens = np.mean([inference.token_count(feed) for feed in shortest[:8]])
    count = int(np.clip(tokens / mean_tokens, 16, 64))
    return [shortest[:count][i] for i in np.random.default_rng(0).permutation(min(count, len(shortest)))]

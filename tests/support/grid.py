"""Exports a family's checkpoint and compares the bundle with PyTorch over a grid of lengths, unbatched and in a padded batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertserve.export import inference
from bertserve.export.int8_texts import BUILT_IN_TEXTS
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Outputs, Precision
from bertserve.service.text.tokenizer import Encoding, Tokenizer
from support.bundles import engine_of, exported
from support.families import ALL_HEADS, FAMILIES

# numbers of text tokens; the grid also has the largest number that fits
COUNTS = (0, 1, 2, 5, 13, 31, 64)


@dataclass(frozen=True)
class Measured:
    """Measurements of a family with a task's head, over the grid."""

    bundle: Bundle  # with graphs in fp32 and int8
    error: float  # largest difference between an fp32 logit and PyTorch's
    int8: float  # root mean square difference between the int8 logits and PyTorch's, divided by their standard deviation

    @property
    def fp32_graph(self) -> GraphSpec:
        return self.bundle.manifest.graphs[0]

    @property
    def int8_graph(self) -> GraphSpec:
        return self.bundle.manifest.graphs[1]

    @property
    def errors(self) -> tuple[float, float, float]:
        """Errors in the table: fp32, int8 on the validation texts, and int8 on the texts of the grid."""
        return self.error, self.int8_graph.validation.quantization_error, self.int8

    @property
    def fused_attentions(self) -> int:
        """Number of layers with fused attention."""
        return sum(self.fp32_graph.validation.fusions.get(name, 0) for name in ("Attention", "MultiHeadAttention"))


def measure(name: str, task: str, folder: Path, **fields: Any) -> Measured:
    """Creates a checkpoint, exports it in fp32 and int8, and compares both graphs with PyTorch."""
    source, bundle = save_bundle(name, task, folder, **fields)
    encodings, expected = compared(source, bundle, task)
    int8 = rows(bundle, "int8", encodings)[0]
    flat = [[np.concatenate([row[key].ravel() for row in side]) for key in side[0]] for side in (expected, int8)]
    return Measured(bundle, worst_error(expected, rows(bundle, "fp32", encodings)), inference.rms_error(*flat))


def most_of_int8(task: str) -> float:
    """Returns the maximum int8 error of random weights, relative to the standard deviation of the outputs, which is small for a single logit."""
    return 1.5 if task == "multiple-choice" else 0.5  # random logits have no margins; the included models are at 0.006 to 0.033


def task_flag(name: str, task: str) -> str:
    """Returns the value of `--task`; for some architectures, `auto` does not select the head of the task."""
    if task == "sentence-order":
        return "text-classification"  # its class has a second head
    # a text generation model is exported only for an explicit task
    return task if "ForConditionalGeneration" in str(FAMILIES[name].architecture(task)) else "auto"


def save_bundle(name: str, task: str, folder: Path, **fields: Any) -> tuple[Path, Bundle]:
    """Creates a checkpoint, exports it in fp32 and int8, and returns the checkpoint and its bundle.

    Random logits have a small standard deviation, so int8 changes many labels. Therefore the int8 gate accepts any error here.
    """
    source = FAMILIES[name].save(folder / "checkpoint", task, **fields)
    options = {"task": task_flag(name, task), "name": "bundle"}
    return source, exported(source, precisions=("fp32", "int8"), max_int8_error=1.0, **options)


def compared(source: Path, bundle: Bundle, task: str) -> tuple[list[Encoding], list[Outputs]]:
    """Returns the encodings of the grid and the checkpoint's outputs for them."""
    encodings = grid(Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer), task)
    return encodings, reference(source, task, bundle, encodings)


def worst_error(expected: Sequence[Outputs], actual: Sequence[Sequence[Outputs]]) -> float:
    """Returns the largest difference from the expected outputs, over all runs."""
    return max(float(np.abs(a[key] - b[key]).max()) for side in actual for a, b in zip(expected, side, strict=True) for key in a)


def logit_error(bundle: Bundle, logits_of: Callable[[torch.Tensor], torch.Tensor], precision: Precision = "fp32") -> float:
    """Returns the largest difference of a bundle's logits from a model's, over the grid.

    Args:
        bundle: The bundle.
        logits_of: Returns the logits of the model, [1, ...], for ids, int64 [1, length].
        precision: Precision of the bundle's graph.
    """
    encodings = grid(Tokenizer(bundle.tokenizer_path, bundle.manifest.tokenizer), bundle.manifest.task)
    with torch.no_grad():
        expected = [{"logits": logits_of(torch.tensor(encoding.ids)[None])[0].numpy()} for encoding in encodings]
    return worst_error(expected, rows(bundle, precision, encodings))


def grid(tokenizer: Tokenizer, task: str) -> list[Encoding]:
    """Returns encodings of every length of the grid, cut from one long text; for fill-mask, the first and last tokens are masked."""
    (whole,) = tokenizer.tokenize([" ".join(BUILT_IN_TEXTS.read_text(encoding="utf-8").splitlines()[:20])])
    pair = task in ("question-answering", "multiple-choice", "next-sentence", "sentence-order")
    encodings = []
    for count in (*COUNTS, tokenizer.max_text_tokens(pair=pair)):
        ids = list(whole.ids[7 : 7 + count])
        if tokenizer.spec.mask is not None and task == "fill-mask":
            masks = sorted({0, count - 1}) if count else []
            for mask in masks:
                ids[mask] = tokenizer.spec.mask.id
            encodings += [tokenizer.assemble(ids, masks=masks)] if masks else []
        elif count or tokenizer.max_text_tokens(pair=pair) < tokenizer.spec.max_length:
            # without special tokens, an empty text has no tokens
            encodings.append(tokenizer.assemble(ids[: count // 3], ids[count // 3 :]) if pair else tokenizer.assemble(ids))
    assert len(encodings[-1]) == tokenizer.spec.max_length
    return encodings


def reference(source: Path, task: str, bundle: Bundle, encodings: Sequence[Encoding]) -> list[Outputs]:
    """Returns the checkpoint's outputs in transformers with its default attention implementation, one text at a time."""
    model = ALL_HEADS[task][1].from_pretrained(source, dtype=torch.float32).eval()
    specs = [spec for spec in bundle.manifest.graphs[0].inputs if spec.fill != "mask_index"]
    rows = []
    for encoding in encodings:
        values = {"token_ids": encoding.ids, "attention_mask": np.ones_like(encoding.ids), "type_ids": encoding.type_ids}
        with torch.no_grad():
            # for multiple choice, a question with one choice
            inputs = {spec.name: torch.tensor(values[spec.fill])[None] for spec in specs}
            outputs = model(**{name: value[None] if task == "multiple-choice" else value for name, value in inputs.items()})
        if task == "sentence-order":
            outputs["logits"] = outputs["sop_logits"]
        if task == "replaced-tokens":
            outputs["logits"] = torch.stack([torch.zeros_like(outputs["logits"]), outputs["logits"]], dim=-1)
        row = {spec.name: outputs[spec.name][0].numpy() for spec in bundle.manifest.graphs[0].outputs}
        rows.append({key: value[list(encoding.masks)] for key, value in row.items()} if encoding.masks else row)
    return rows


def rows(bundle: Bundle, precision: Precision, encodings: Sequence[Encoding]) -> tuple[list[Outputs], list[Outputs]]:
    """Returns a graph's outputs for each encoding without batching, and for all encodings in one padded batch."""
    engine = engine_of(bundle, bundle.graph("cpu", precision))
    return [engine.run([encoding])[0] for encoding in encodings], engine.run(encodings)

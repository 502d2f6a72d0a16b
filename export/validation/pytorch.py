"""The checkpoint in PyTorch float32 as the reference for graphs, and the validation reports of graphs that are measured against it.

The Hugging Face tokenizer creates the inputs, with its own truncation and windows, so that the service's tokenizer is validated too.
"""

from __future__ import annotations

import os
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from bertserve.export import calibration
from bertserve.export.bundle import CARD_FIELDS, bundle_texts
from bertserve.export.calibration import SplitTexts, digest_texts
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.checkpoint.module import load_module
from bertserve.export.checkpoint.signature import read_output, returning_attention
from bertserve.export.errors import CheckpointError, DataError, ParityError
from bertserve.export.progress import time_runs, track
from bertserve.export.tasks.all_tasks import TASKS
from bertserve.export.tasks.spec import LONG, NAMES, SAMPLE_TEXTS, TokenizerCall
from bertserve.export.validation.comparison import Reference, compare
from bertserve.export.validation.served_graph import Answer, open_graph, sample_requests
from bertserve.export.validation.verify import Report, VerifySpec
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Outputs, Speed, Timing
from bertserve.service.bundle.manifest import Example, Manifest
from bertserve.service.check import difference
from bertserve.service.engine.hardware import cpu_instructions, cpu_name
from bertserve.service.engine.onnx_engine import Engine
from bertserve.service.errors import BertServeError, EngineError
from bertserve.service.tasks import attention
from bertserve.service.text.tokenizer import Encoding, Tokenizer

MAX_ATTENTION_TOKENS = 512  # of a text with attention; PyTorch returns the maps of all layers and heads at once
_ATTENTION_TEXTS = 7  # number of the built-in texts to use; each runs with the weights of all layers and heads

TIMED_LENGTHS = (16, 64, 128)  # in tokens; the model's maximum length is timed too
MAX_TIMED_SECONDS = 0.5  # for each length
TIMED_RUNS = (3, 15)  # minimum and maximum


def sample_reference(checkpoint: Checkpoint, texts: SplitTexts | None = None) -> Reference:
    """Returns the checkpoint's answers to the samples of its task, and to texts to validate int8, which were not used to create it.

    Raises:
        ParityError: PyTorch or the tokenizer cannot run some of them.
    """
    spec, tokenizer = checkpoint.tokenizer_spec, checkpoint.tokenizer
    texts = texts or SplitTexts()
    texts = replace(texts, passages=tuple(passage for passage in texts.passages if passage not in texts.lines))
    try:
        fixed = sample_requests(checkpoint, spec, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
        requests = [*fixed, *TASKS[checkpoint.task].ordinary_requests(texts, spec)]
        answers = [Answer((), run(checkpoint, request), None) for request in track(requests, "run PyTorch", unit="samples")]
        maps = _sample_attention(checkpoint) if checkpoint.attention_heads else []
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ParityError(
            f"{type(checkpoint.model).__name__} cannot run all samples of up to {spec.max_length} tokens in PyTorch: {error}; either this "
            "kind of model is not supported, or the lengths in its configuration are wrong or too short for its task."
        ) from error
    return Reference("the checkpoint", requests, answers, len(fixed), answer=partial(_answer, checkpoint), maps=maps)


def _answer(checkpoint: Checkpoint, request: Any) -> Answer:
    try:
        rows = run(checkpoint, request)
    except ValueError as error:
        raise EngineError(str(error)) from error
    if not all(np.isfinite(values).all() for row in rows for values in row.values()):
        raise EngineError("PyTorch's outputs are not finite.")
    return Answer((), rows, None)


def run(checkpoint: Checkpoint, request: Any) -> list[Outputs]:
    """Returns the outputs of each window of a request in PyTorch; windows run alone, because they change each other in some models."""
    call = TASKS[checkpoint.task].tokenizer_call(request, checkpoint.tokenizer_spec)
    return [_run_window(checkpoint, window) for window in _windows(checkpoint, call)]


def _windows(checkpoint: Checkpoint, call: TokenizerCall) -> list[dict[str, list[int]]]:
    """Returns the inputs of each window or choice, with the Hugging Face tokenizer's own truncation."""
    length = call.length or checkpoint.tokenizer_spec.max_length
    try:
        batch = checkpoint.tokenizer(
            *call.texts,
            truncation=call.truncation,
            max_length=length,
            stride=call.stride or 0,
            return_overflowing_tokens=call.stride is not None,
            return_token_type_ids=True,
            return_attention_mask=True,
        )
    except BaseException as error:  # the library raises a plain Exception, and a panic of Rust is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"a window of {length} tokens has no room for the text and its overlap: {error}") from error
    is_nested = call.stride is not None or isinstance(call.texts[0], list)
    nested = batch if is_nested else {name: [values] for name, values in batch.items()}
    if not any(piece.type_id for piece in (*checkpoint.tokenizer_spec.single, *(checkpoint.tokenizer_spec.pair or ()))):
        # the library gives other types than the template's from the second window on
        nested["token_type_ids"] = [[0] * len(ids) for ids in nested["input_ids"]]
    names = [spec.name for spec in checkpoint.inputs if spec.name in nested]
    windows = [{name: nested[name][i] for name in names} for i in range(len(nested["input_ids"]))]
    # if the beginning of a text is cut, transformers returns the last window first
    return windows[::-1] if call.stride is not None and checkpoint.tokenizer_spec.truncation_side == "left" else windows


def _run_window(checkpoint: Checkpoint, window: dict[str, list[int]]) -> Outputs:
    """Returns a window's outputs from PyTorch in the engine's form, float32 by name."""
    with torch.no_grad():
        outputs = checkpoint.model(**{name: torch.tensor([values]) for name, values in window.items()})
    row = {spec.name: read_output(outputs, spec.name)[0].numpy() for spec in checkpoint.outputs if spec.kind != "per_map"}
    if checkpoint.mask is not None:
        masks = [i for i, id_ in enumerate(window["input_ids"]) if id_ == checkpoint.mask.id]
        row = {name: values[masks] for name, values in row.items()}
    return row


def _sample_attention(checkpoint: Checkpoint) -> list[tuple[attention.AttentionRequest, NDArray[np.float32]]]:
    """Returns the checkpoint's attention for short and long texts, for as many heads as an answer may have."""
    spec, all_heads = checkpoint.tokenizer_spec, [(i, head) for i, count in enumerate(checkpoint.attention_heads) for head in range(count)]
    texts = [(text,) for text in (*SAMPLE_TEXTS[:_ATTENTION_TEXTS], LONG, LONG * 9)]
    pairs = [] if spec.pair is None else [("A man is eating food.", "Someone eats."), (LONG * 2, NAMES)]
    samples = []
    for parts in (*texts, *pairs):
        ordered = parts[::-1] if spec.second_text_first else parts
        batch = checkpoint.tokenizer(*ordered, return_tensors="pt", return_token_type_ids=True, return_attention_mask=True)
        length = batch["input_ids"].shape[1]
        if not 0 < length <= min(spec.max_length, MAX_ATTENTION_TOKENS):
            continue
        with torch.no_grad(), returning_attention(checkpoint.model):
            weights = checkpoint.model(**{spec.name: batch[spec.name] for spec in checkpoint.inputs if spec.name in batch})["attentions"]
        maps = calibration.sample(all_heads, attention.MAX_VALUES // length**2)
        heads = {layer: tuple(head for map_layer, head in maps if map_layer == layer) for layer, _ in maps}
        request = attention.AttentionRequest(parts[0], parts[1] if len(parts) > 1 else None, tuple(heads.items()))
        samples.append((request, np.concatenate([weights[layer][0, list(indices)].numpy() for layer, indices in heads.items()])))
    return samples


def load_checkpoint_of(manifest: Manifest, spec: VerifySpec, report: Report) -> Checkpoint:
    """Loads the checkpoint or the trusted module of a verification, for the task and layers of its bundle, and compares weights and settings.

    Raises:
        CheckpointError: It cannot be loaded, or does not fit the bundle.
        MissingPackageError: It is a LoRA adapter, and peft is not installed.
    """
    assert spec.checkpoint is not None, "the caller asks for it"
    if spec.module:
        checkpoint = load_module(spec.checkpoint)
        if checkpoint.task != manifest.task:
            raise CheckpointError(f"the module of `{spec.checkpoint}` is for {checkpoint.task}, but the bundle is for {manifest.task}.")
    elif ".py:" in manifest.source.checkpoint:
        raise CheckpointError(
            f"the bundle was made from the module `{manifest.source.checkpoint}`; give --module FILE:FACTORY and "
            "--trust-module instead of --checkpoint."
        )
    else:
        checkpoint = load_checkpoint(
            spec.checkpoint,
            task=manifest.task,
            revision=spec.revision,
            layers="last" if manifest.embedding is None else manifest.embedding.layers,
            attentions=bool(manifest.attention_heads),
            ignored_weights=manifest.source.ignored_weights,
            token_types=manifest.source.token_types,
        )
    expected, actual = manifest.source.weights_sha256, checkpoint.origin.weights_sha256
    detail = f"sha256 over its weights is {actual[:12]}…, the manifest says {expected[:12]}…"
    report.add("checkpoint", expected == actual, detail, {"weights_sha256": actual})
    reason = compare_settings(manifest, checkpoint)
    detail = f"in the checkpoint {reason}" if reason else "labels, activation, embedding and tokenizer are those of the checkpoint"
    report.add("settings", reason is None, detail)
    return checkpoint


def compare_settings(manifest: Manifest, checkpoint: Checkpoint) -> str | None:
    """Returns a setting of a bundle that differs from its checkpoint, except the choices of the user at the export; None if none does.

    The comparison of outputs cannot find it, because it decodes both outputs with the same settings.
    """
    user_choices = {"embedding": {"layers", "default_layers", "combine"}, "tokenizer": {"sha256"}}
    updates = {name: getattr(checkpoint, name) for name in ("labels", "activation", "embedding")} | {"tokenizer": checkpoint.tokenizer_spec}
    manifest_settings, checkpoint_settings = (
        side.model_dump(mode="json", include={*updates}, exclude=user_choices) for side in (manifest, manifest.model_copy(update=updates))
    )
    return difference(manifest_settings, checkpoint_settings, 0.0)


def measure_graph(folder: Path, graph: GraphSpec, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Reference) -> GraphSpec:
    """Compares a graph with its checkpoint, and times it; returns its manifest entry with a new validation report.

    The facts about the graph's creation in the report, on which the bounds depend, stay the same. It raises ParityError if the graph does not
    agree with the checkpoint, or cannot be served.
    """
    spec = checkpoint.tokenizer_spec
    try:
        served = open_graph(folder, graph, spec, tokenizer, checkpoint)
        comparison = compare(served, reference)
        comparison.check()
    except BertServeError as error:
        raise ParityError(
            f"{type(checkpoint.model).__name__} is not supported: its {graph.precision} graph cannot be served. {error}"
        ) from error
    model = ir.load(folder / graph.file)
    updates = comparison.measured() | {
        "nodes": len(model.graph),
        "opset": model.graph.opset_imports.get(""),
        "speed": measure_latency(served.engine, max_length=spec.max_length, pad_id=spec.pad_id),
    }
    report = graph.validation.model_copy(update=updates)
    return graph.model_copy(update={"validation": report, "batch_invariant": comparison.batch_invariant})


def measure_latency(engine: Engine, *, max_length: int, pad_id: int) -> Speed:
    """Times a few runs of single texts at each length in tokens, on one thread; the token `pad_id` fills the texts."""

    def median_ms(length: int) -> float:
        batch = [Encoding(np.full(length, pad_id, dtype=np.int64), np.zeros(length, dtype=np.int64), masks=(1,))]
        return round(1000 * statistics.median(time_runs(lambda: engine.run(batch), TIMED_RUNS, MAX_TIMED_SECONDS)), 3)

    lengths = sorted({min(length, max_length) for length in (*TIMED_LENGTHS, max_length)})
    timings = tuple(Timing(length=length, median_ms=median_ms(length)) for length in lengths)
    return Speed(cpu=cpu_name(), instructions=cpu_instructions(), threads=1, timings=timings)


def answer_example(graph: GraphSpec, folder: Path, checkpoint: Checkpoint, tokenizer: Tokenizer) -> Example:
    """Returns a request body and the graph's answer to it, in the format of the HTTP API; the graph runs on the provider of its measurements."""
    spec = checkpoint.tokenizer_spec
    served = open_graph(folder, graph, spec, tokenizer, checkpoint)
    request = TASKS[checkpoint.task].example(spec)
    return Example(request=request, result=served.answer_body(request))


def update(bundle: Bundle, checkpoint: Checkpoint, tokenizer: Tokenizer, validation: Path | None) -> None:
    """Compares all graphs of a verified bundle with its checkpoint again, times them, and writes the new manifest and card.

    `validation` has texts to validate int8, none of which it was created with; None for those of the export.

    Raises:
        ExportError: A graph does not agree with the checkpoint, or the texts cannot be used.
        OSError: A file cannot be written.
    """
    manifest, int8_texts, texts = bundle.manifest, bundle.manifest.int8_texts, SplitTexts()
    if any(graph.precision == "int8" for graph in manifest.graphs):
        texts = calibration.read_validation_texts(manifest, validation)
    elif validation is not None:
        raise DataError(f"`{manifest.name}` has no int8 graph, which --validation needs; remove --validation.")
    calibration.refuse_pairs((texts,), manifest.task, manifest.tokenizer)
    if int8_texts is not None:
        int8_texts = int8_texts.model_copy(update={"report": digest_texts((*texts.lines, *texts.pairs))})
    reference = sample_reference(checkpoint, texts.with_passages(tokenizer))
    graphs = tuple(measure_graph(bundle.path, graph, checkpoint, tokenizer, reference) for graph in manifest.graphs)
    source = manifest.source.model_copy(update=checkpoint.origin.model_dump(include=CARD_FIELDS))
    updates = {"graphs": graphs, "flops": checkpoint.flops, "source": source, "int8_texts": int8_texts}
    new_manifest = Manifest.model_validate(manifest.model_copy(update=updates).model_dump())
    # each file is replaced as a whole; the card comes first, because the manifest is verified
    for name, text in bundle_texts(new_manifest, bundle.path, checkpoint.card).items():
        aside = bundle.path / f".{name}"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, bundle.path / name)

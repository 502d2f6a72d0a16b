"""The checkpoint in PyTorch float32 as the reference for graphs, at export and for `verify`, and the reports that are measured with it.

The Hugging Face tokenizer creates the inputs, with its own truncation and windows, so that the service's tokenizer is validated too.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray

from bertserve.export import int8_texts
from bertserve.export.bundle import CARD_FIELDS, bundle_texts, model_card
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import LoadOptions, load_checkpoint
from bertserve.export.checkpoint.module import load_module
from bertserve.export.checkpoint.signature import read_output, returning_attention
from bertserve.export.errors import CheckpointError, DataError, GraphError
from bertserve.export.int8_texts import SplitTexts, hash_texts
from bertserve.export.progress import track
from bertserve.export.tasks.all_tasks import EXPORT_TASKS
from bertserve.export.tasks.sample_texts import LONG_TEXT, NAMES_TEXT, SAMPLE_TEXTS
from bertserve.export.validation.comparison import Reference, compare
from bertserve.export.validation.served_graph import MAX_FULL_LENGTH, ModelAnswer, open_graph, sample_requests
from bertserve.export.workspace import ignore_signals
from bertserve.service.bundle.files import Bundle
from bertserve.service.bundle.graph_spec import GraphSpec, Outputs, Speed, Timing
from bertserve.service.bundle.manifest import Manifest
from bertserve.service.check import difference
from bertserve.service.engine.hardware import cpu_instructions, cpu_name
from bertserve.service.engine.onnx_engine import OnnxEngine
from bertserve.service.errors import BertServeError, EngineError
from bertserve.service.tasks import attention
from bertserve.service.text.tokenizer import Encoding, Tokenizer

if TYPE_CHECKING:
    from bertserve.export.validation.verify import VerifyOptions, VerifyReport


def sample_reference(checkpoint: Checkpoint, texts: SplitTexts | None = None) -> Reference:
    """Returns the checkpoint's answers to the samples of its task, and to texts to validate int8, which were not used to create it.

    Raises:
        GraphError: PyTorch or the tokenizer cannot run some of them.
    """
    spec, tokenizer = checkpoint.tokenizer_spec, checkpoint.tokenizer
    texts = texts or SplitTexts()
    texts = replace(texts, passages=tuple(passage for passage in texts.passages if passage not in texts.lines))
    try:
        fixed = sample_requests(checkpoint, spec, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
        requests = [*fixed, *EXPORT_TASKS[checkpoint.task].int8_requests(texts, spec)]
        predictions = [
            ModelAnswer((), run_request(checkpoint, request), None) for request in track(requests, "run PyTorch", unit="samples")
        ]
        maps = _sample_attention(checkpoint) if checkpoint.attention_heads else []
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise GraphError(
            f"{type(checkpoint.model).__name__} cannot run samples of up to {spec.max_length} tokens in PyTorch: {error}; it is not "
            "supported, or the lengths in its configuration are wrong or too short for its task."
        ) from error

    def predict(request: Any) -> ModelAnswer:
        try:
            rows = run_request(checkpoint, request)
        except ValueError as error:
            raise EngineError(str(error)) from error
        if not all(np.isfinite(values).all() for row in rows for values in row.values()):
            raise EngineError("PyTorch's outputs are not finite.")
        return ModelAnswer((), rows, None)

    return Reference("the checkpoint", requests, predictions, len(fixed), predict, maps=maps)


def run_request(checkpoint: Checkpoint, request: Any) -> list[Outputs]:
    """Returns the outputs of each window of a request in PyTorch; windows run alone, because they change each other in some models."""
    texts, options = EXPORT_TASKS[checkpoint.task].tokenizer_call(request, checkpoint.tokenizer_spec)
    return [_run_window(checkpoint, window) for window in _windows(checkpoint, texts, options)]


def _windows(checkpoint: Checkpoint, texts: Sequence[Any], options: Mapping[str, Any]) -> list[dict[str, list[int]]]:
    """Returns the inputs of each window or choice, with the Hugging Face tokenizer's own truncation."""
    options = {"truncation": "longest_first", "max_length": checkpoint.tokenizer_spec.max_length, **options}
    try:
        batch = checkpoint.tokenizer(
            *(text if isinstance(text, list) else [text] for text in texts),
            **options,
            return_overflowing_tokens="stride" in options,
            return_token_type_ids=True,
            return_attention_mask=True,
        )
    except BaseException as error:  # the library raises a plain Exception, and a panic of Rust is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"a window of {options['max_length']} tokens has no room for the text and its overlap: {error}") from error
    if not any(part.type_id for part in checkpoint.tokenizer_spec.parts):
        # the library gives other types than the template's from the second window on
        batch["token_type_ids"] = [[0] * len(ids) for ids in batch["input_ids"]]
    names = [spec.name for spec in checkpoint.inputs if spec.name in batch]
    windows = [{name: batch[name][i] for name in names} for i in range(len(batch["input_ids"]))]
    # if the beginning of a text is cut, transformers returns the last window first
    return windows[::-1] if "stride" in options and checkpoint.tokenizer_spec.truncation_side == "left" else windows


def _run_window(checkpoint: Checkpoint, window: dict[str, list[int]]) -> Outputs:
    """Returns a window's outputs from PyTorch in the engine's form, float32 by name."""
    with torch.no_grad():
        outputs = checkpoint.model(**{name: torch.tensor([values]) for name, values in window.items()})
    row = {spec.name: read_output(outputs, spec.name)[0].numpy() for spec in checkpoint.outputs if spec.kind != "per_map"}
    if checkpoint.mask is not None:
        masks = [i for i, id_ in enumerate(window["input_ids"]) if id_ == checkpoint.mask.id]
        row = {name: values[masks] for name, values in row.items()}
    return row


def _sample_attention(checkpoint: Checkpoint) -> list[tuple[attention.AttentionInput, NDArray[np.float32]]]:
    """Returns the checkpoint's attention for short and long texts, for as many heads as an answer may have."""
    spec, all_heads = checkpoint.tokenizer_spec, [(i, head) for i, count in enumerate(checkpoint.attention_heads) for head in range(count)]
    texts = [(text,) for text in (*SAMPLE_TEXTS[:7], LONG_TEXT, LONG_TEXT * 9)]
    pairs = [] if spec.pair is None else [("A man is eating food.", "Someone eats."), (LONG_TEXT * 2, NAMES_TEXT)]
    samples = []
    for parts in (*texts, *pairs):
        ordered = parts[::-1] if spec.second_text_first else parts
        batch = checkpoint.tokenizer(*ordered, return_tensors="pt", return_token_type_ids=True, return_attention_mask=True)
        length = batch["input_ids"].shape[1]
        if not 0 < length <= min(spec.max_length, 512):  # PyTorch returns the maps of all layers and heads
            continue
        with torch.no_grad(), returning_attention(checkpoint.model):
            weights = checkpoint.model(**{spec.name: batch[spec.name] for spec in checkpoint.inputs if spec.name in batch})["attentions"]
        maps = int8_texts.sample(all_heads, attention.MAX_VALUES // length**2)
        heads = {layer: tuple(head for map_layer, head in maps if map_layer == layer) for layer, _ in maps}
        request = attention.AttentionInput(parts[0], parts[1] if len(parts) > 1 else None, tuple(heads.items()))
        samples.append((request, np.concatenate([weights[layer][0, list(indices)].numpy() for layer, indices in heads.items()])))
    return samples


def measure_graph(folder: Path, graph: GraphSpec, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Reference) -> GraphSpec:
    """Compares a graph with its checkpoint, and times it; returns its manifest entry with a new validation report.

    The facts about the graph's creation in the report, on which the bounds depend, stay the same.
    """
    spec = checkpoint.tokenizer_spec
    try:
        served = open_graph(folder, graph, spec, tokenizer, checkpoint)
        comparison = compare(served, reference)
        comparison.check()
    except BertServeError as error:
        raise GraphError(
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


def measure_latency(engine: OnnxEngine, *, max_length: int, pad_id: int) -> Speed:
    """Times single texts of a few lengths up to `MAX_FULL_LENGTH` tokens on one thread, 3 to 15 runs each; the token `pad_id` fills the texts."""

    def median_ms(length: int) -> float:
        batch = [Encoding(np.full(length, pad_id, dtype=np.int64), np.zeros(length, dtype=np.int64), masks=(1,))]
        engine.run(batch)  # the first run is slower
        seconds: list[float] = []
        while len(seconds) < 3 or (len(seconds) < 15 and sum(seconds) < 0.5):
            start = time.perf_counter()
            engine.run(batch)
            seconds.append(time.perf_counter() - start)
        return round(1000 * statistics.median(seconds), 3)

    lengths = sorted({min(length, max_length) for length in (16, 64, 128, MAX_FULL_LENGTH)})
    timings = tuple(Timing(length=length, median_ms=median_ms(length)) for length in lengths)
    return Speed(cpu=cpu_name(), instructions=cpu_instructions(), threads=1, timings=timings)


def load_bundle_checkpoint(manifest: Manifest, options: VerifyOptions, report: VerifyReport) -> Checkpoint:
    """Loads the checkpoint or the trusted module for the task and layers of a bundle, and compares weights and settings."""
    assert options.checkpoint is not None, "the caller asks for it"
    if options.module:
        checkpoint = load_module(options.checkpoint)
        if checkpoint.task != manifest.task:
            raise CheckpointError(f"the module of `{options.checkpoint}` is for {checkpoint.task}, but the bundle is for {manifest.task}.")
    elif ".py:" in manifest.source.checkpoint:
        raise CheckpointError(
            f"the bundle was made from the module `{manifest.source.checkpoint}`; give --module FILE:FACTORY and --trust-module."
        )
    else:
        load_options = LoadOptions(
            task=manifest.task,
            revision=options.revision,
            layers="last" if manifest.embedding is None else manifest.embedding.layers,
            attentions=bool(manifest.attention_heads),
            ignored_weights=manifest.source.ignored_weights,
            token_types=manifest.source.token_types,
        )
        checkpoint = load_checkpoint(options.checkpoint, load_options)
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


def update(bundle: Bundle, checkpoint: Checkpoint, tokenizer: Tokenizer, validation: Path | None) -> None:
    """Compares all graphs of a verified bundle with its checkpoint again, times them, and writes the new manifest and card.

    `validation` has texts to validate int8, none of which it was created with; None for those of the export.

    Raises:
        ExportError: A graph does not agree with the checkpoint, or the texts cannot be used.
        OSError: A file cannot be written.
    """
    manifest, digests, texts = bundle.manifest, bundle.manifest.int8_texts, SplitTexts()
    if any(graph.precision == "int8" for graph in manifest.graphs):
        texts = int8_texts.read_validation_texts(manifest, validation)
    elif validation is not None:
        raise DataError(f"`{manifest.name}` has no int8 graph, which --validation needs; remove --validation.")
    int8_texts.refuse_pairs((texts,), manifest.task, manifest.tokenizer)
    if digests is not None:
        digests = digests.model_copy(update={"report": hash_texts((*texts.lines, *texts.pairs))})
    reference = sample_reference(checkpoint, texts.with_passages(tokenizer))
    graphs = tuple(measure_graph(bundle.path, graph, checkpoint, tokenizer, reference) for graph in manifest.graphs)
    source = manifest.source.model_copy(update=checkpoint.origin.model_dump(include=CARD_FIELDS))
    updates = {"graphs": graphs, "flops": checkpoint.flops, "source": source, "int8_texts": digests}
    new_manifest = Manifest.model_validate(manifest.model_copy(update=updates).model_dump())
    card = model_card(new_manifest, bundle.path, checkpoint.card)
    # each file is replaced as a whole; the manifest comes last, because it is verified
    with ignore_signals():
        for name, text in bundle_texts(new_manifest, card).items():
            aside = bundle.path / f".{name}"
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, bundle.path / name)

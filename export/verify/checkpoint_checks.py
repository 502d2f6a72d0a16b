"""Compares the graphs of a bundle with the checkpoint in PyTorch. It needs torch and transformers, unlike the other checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.checkpoint.module import load_module
from bertserve.export.errors import CheckpointError, ParityError
from bertserve.export.evidence.attention_parity import measure_attention
from bertserve.export.evidence.parity import INT8_SLACK, measure_parity
from bertserve.export.evidence.reference import Reference, sample_reference
from bertserve.export.verify.data_checks import Baseline
from bertserve.export.verify.loaded_graph import Check, LoadedGraph
from bertserve.service.bundle.evidence_policy import summarize_agreement
from bertserve.service.bundle.files import Bundle
from bertserve.service.errors import BertServeError, EngineError
from bertserve.service.tasks.batch import TaskModel, first_batch, result_of
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Budget
from bertserve.service.text.tokenizer import Tokenizer
from bertserve.service.wire.json_text import to_plain


def load_checkpoint_of(bundle: Bundle, source: str, *, revision: str | None = None, module: bool = False) -> Checkpoint:
    """Loads a checkpoint for the task and layers of a bundle.

    Args:
        bundle: The bundle.
        source: A folder or a hub id, or of a module `FILE:FACTORY`.
        revision: Branch, tag or commit of a hub id.
        module: Whether `source` is a module, whose code is trusted and run.

    Raises:
        CheckpointError: It cannot be loaded, or is not what the bundle was made from.
        MissingPackageError: It is a LoRA adapter, and peft is not installed.
    """
    manifest = bundle.manifest
    if module:
        checkpoint = load_module(source)
        if checkpoint.task != manifest.task:
            raise CheckpointError(
                f"the module of `{source}` is for {checkpoint.task}, and the bundle for {manifest.task}; give the right one."
            )
        return checkpoint
    if re.fullmatch(r".+\.py:\w+", manifest.source.checkpoint):
        raise CheckpointError(
            f"the bundle was made from the module `{manifest.source.checkpoint}`; give --module FILE:FACTORY and --trust-module in place of "
            "--checkpoint."
        )
    layers = "last" if manifest.embedding is None else manifest.embedding.layers
    return load_checkpoint(
        source,
        task=manifest.task,
        revision=revision,
        layers=layers,
        attentions=bool(manifest.attention_heads),
        ignored_weights=manifest.source.ignored_weights,
    )


def check_parity(graphs: list[LoadedGraph], checkpoint: Checkpoint) -> Iterator[Check]:
    """Checks the digest of the checkpoint's weights, and compares each graph with it as the export did."""
    manifest = graphs[0].bundle.manifest
    yield Check(
        "checkpoint",
        manifest.source.weights_sha256 == checkpoint.weights_sha256,
        f"sha256 over its weights is {checkpoint.weights_sha256[:12]}…, the manifest says {manifest.source.weights_sha256[:12]}…",
        {"weights_sha256": checkpoint.weights_sha256},
    )
    reference = sample_reference(checkpoint)
    for loaded in graphs:
        name, evidence = f"parity {loaded.name}", loaded.graph.evidence
        try:
            int8_bound = INT8_SLACK * evidence.quantization_error
            parity = measure_parity(loaded.engine, loaded.tokenizer, reference, checkpoint, loaded.graph.precision, int8_bound)
            attention_error = measure_attention(loaded.engine, loaded.tokenizer, reference.attention, loaded.graph.precision)
        except (BertServeError, ParityError) as error:
            yield Check(name, False, str(error))
            continue
        yield Check(
            name,
            True,
            f"worst logit error {parity.worst_abs_error:.1e} (at export {evidence.worst_abs_error:.1e}), agreement "
            f"{summarize_agreement(parity.agreement)} (at export {summarize_agreement(evidence.agreement)}), "
            f"longest row {parity.longest} of {checkpoint.max_length} tokens"
            + ("" if attention_error is None else f", worst error of an attention weight {attention_error:.1e}"),
            {"worst_abs_error": parity.worst_abs_error, "samples": parity.samples, "label_agreement": parity.label_agreement}
            | {"agreement": parity.agreement.model_dump(), "longest": parity.longest}
            | {"lengths": [entry.model_dump() for entry in parity.lengths], "span_agreement": parity.span_agreement}
            | ({} if attention_error is None else {"attention_error": attention_error}),
        )


def checkpoint_baseline(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Baseline:
    """Returns the checkpoint as what graphs are compared with on a user's data."""
    return Baseline("the checkpoint", lambda request: _answer(checkpoint, tokenizer, request))


def _answer(checkpoint: Checkpoint, tokenizer: Tokenizer, request: Any) -> Any:
    """Returns the checkpoint's result in PyTorch, with the Hugging Face tokenizer's own truncation and windows.

    Raises:
        EngineError: Its outputs are not finite, or its windows are not the service's.
    """
    task, model = TASKS[checkpoint.task].run, TaskModel(tokenizer, checkpoint, Budget())
    count = len(first_batch(task, request, model).encodings)
    (rows,) = Reference(checkpoint, [request]).rows
    if len(rows) != count:
        raise EngineError(f"its tokenizer makes {len(rows)} windows where the bundle's makes {count}.")
    if not all(np.isfinite(values).all() for row in rows for values in row.values()):
        raise EngineError("PyTorch's outputs are not finite.")
    return to_plain(result_of(task, request, model, rows))

"""Compares the graphs of a bundle with the checkpoint in PyTorch. Unlike the other checks, it needs torch and transformers.

`remeasure` also writes a new validation report into the bundle's manifest and card, but keeps graphs and tokenizer. It is for bundles of an
older bert-export, whose manifests lack newer tables, and for a speed table of the current machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bertserve.export import calibration
from bertserve.export.artifact import Artifact
from bertserve.export.bundle import model_card
from bertserve.export.calibration import Texts, hashes_of, read_texts, split_digest, text_hash
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.checkpoint.load import load_checkpoint
from bertserve.export.checkpoint.module import load_module
from bertserve.export.errors import CheckpointError, DataError, ParityError
from bertserve.export.validation.measure import measure_graph
from bertserve.export.validation.parity import INT8_SLACK, measure_parity
from bertserve.export.validation.reference import NO_TEXTS, Reference, measure_attention, sample_reference
from bertserve.export.verify.graph_checks import BundleCheck, LoadedGraph
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, Bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest, TextSplits
from bertserve.service.bundle.validation_policy import summarize_agreement
from bertserve.service.errors import BertServeError, EngineError
from bertserve.service.tasks.batch import TaskModel, first_batch, result_of
from bertserve.service.tasks.catalog import TASKS
from bertserve.service.tasks.cost import Budget
from bertserve.service.text.tokenizer import Tokenizer
from bertserve.service.wire.json_text import to_plain

_SHOWN_CHARS = 200  # of a setting in the report


def load_checkpoint_of(bundle: Bundle, source: str, *, revision: str | None = None, module: bool = False) -> Checkpoint:
    """Loads a checkpoint for the task and layers of a bundle; if `module`, the source is `FILE:FACTORY`, whose code is trusted and run.

    Raises:
        CheckpointError: It cannot be loaded, or the bundle was made from another one.
        MissingPackageError: It is a LoRA adapter, and peft is not installed.
    """
    manifest = bundle.manifest
    if module:
        checkpoint = load_module(source)
        if checkpoint.task != manifest.task:
            raise CheckpointError(
                f"the module of `{source}` is for {checkpoint.task}, but the bundle is for {manifest.task}; give the right one."
            )
        return checkpoint
    if re.fullmatch(r".+\.py:\w+", manifest.source.checkpoint):
        raise CheckpointError(
            f"the bundle was made from the module `{manifest.source.checkpoint}`; give --module FILE:FACTORY and "
            "--trust-module instead of --checkpoint."
        )
    layers = "last" if manifest.embedding is None else manifest.embedding.layers
    return load_checkpoint(
        source,
        task=manifest.task,
        revision=revision,
        layers=layers,
        attentions=bool(manifest.attention_heads),
        ignored_weights=manifest.source.ignored_weights,
        token_types=manifest.source.token_types,
    )


def check_parity(graphs: list[LoadedGraph], checkpoint: Checkpoint) -> Iterator[BundleCheck]:
    """Checks the weights' digest and the settings of the checkpoint, and compares each graph with it like the export."""
    manifest = graphs[0].bundle.manifest
    yield BundleCheck(
        "checkpoint",
        manifest.source.weights_sha256 == checkpoint.weights_sha256,
        f"sha256 over its weights is {checkpoint.weights_sha256[:12]}…, the manifest says {manifest.source.weights_sha256[:12]}…",
        {"weights_sha256": checkpoint.weights_sha256},
    )
    differences = compare_settings(manifest, checkpoint)
    yield BundleCheck(
        "settings",
        not differences,
        "; ".join(differences) or "labels, activation, embedding and tokenizer are those of the checkpoint",
        {"differences": differences},
    )
    reference = sample_reference(checkpoint)
    for loaded in graphs:
        name, validation = f"parity {loaded.name}", loaded.graph.evidence
        try:
            int8_bound = INT8_SLACK * validation.quantization_error
            parity = measure_parity(loaded.engine, loaded.tokenizer, reference, checkpoint, loaded.graph.precision, int8_bound)
            attention_error = measure_attention(loaded.engine, loaded.tokenizer, reference.attention, loaded.graph.precision)
        except (BertServeError, ParityError) as error:
            yield BundleCheck(name, False, str(error))
            continue
        yield BundleCheck(
            name,
            True,
            f"worst logit error {parity.worst_abs_error:.1e} (at export {validation.worst_abs_error:.1e}), agreement "
            f"{summarize_agreement(parity.agreement)} (at export {summarize_agreement(validation.agreement)}), "
            f"longest row {parity.longest} of {checkpoint.tokenizer_spec.max_length} tokens"
            + ("" if attention_error is None else f", worst error of an attention weight {attention_error:.1e}"),
            {"worst_abs_error": parity.worst_abs_error, "samples": parity.samples, "label_agreement": parity.label_agreement}
            | {"agreement": parity.agreement.model_dump(), "longest": parity.longest}
            | {"lengths": [entry.model_dump() for entry in parity.lengths], "span_agreement": parity.span_agreement}
            | ({} if attention_error is None else {"attention_error": attention_error}),
        )


def compare_settings(manifest: Manifest, checkpoint: Checkpoint) -> list[str]:
    """Returns the settings of a bundle that differ from its checkpoint, except the choices of the user at the export.

    The comparison of outputs cannot find them, because it decodes both outputs with the settings of the checkpoint.
    """
    chosen = {"embedding": {"layers", "default_layers", "combine"}, "tokenizer": {"sha256"}}
    from_bundle = manifest.model_dump(include={"labels", "activation", "embedding", "tokenizer"}, exclude=chosen)
    updates = {name: getattr(checkpoint, name) for name in ("labels", "activation", "embedding")} | {"tokenizer": checkpoint.tokenizer_spec}
    from_checkpoint = manifest.model_copy(update=updates).model_dump(include=set(from_bundle), exclude=chosen)
    pairs = []
    for name, value in from_bundle.items():
        other = from_checkpoint[name]
        if isinstance(value, dict) and isinstance(other, dict):
            pairs += [(f"{name}.{key}", value[key], other[key]) for key in value]
        else:
            pairs.append((name, value, other))
    return [f"`{name}` is {_shorten(value)}, but {_shorten(other)} in the checkpoint" for name, value, other in pairs if value != other]


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def answer(checkpoint: Checkpoint, tokenizer: Tokenizer, request: Any) -> Any:
    """Returns the checkpoint's result in PyTorch, with the Hugging Face tokenizer's own truncation and windows.

    Raises:
        EngineError: Its outputs are not finite, or its windows differ from the service's.
    """
    task, model = TASKS[checkpoint.task].run, TaskModel(tokenizer, checkpoint, Budget())
    count = len(first_batch(task, request, model).encodings)
    (rows,) = Reference(checkpoint, [request]).rows
    if len(rows) != count:
        raise EngineError(f"its tokenizer makes {len(rows)} windows, but the bundle's makes {count}.")
    if not all(np.isfinite(values).all() for row in rows for values in row.values()):
        raise EngineError("PyTorch's outputs are not finite.")
    return to_plain(result_of(task, request, model, rows))


def remeasure(bundle: Bundle, checkpoint: Checkpoint, validation: Path | None = None) -> Manifest:
    """Compares all graphs with the checkpoint again, times them, and writes the new manifest and card.

    `validation` is a file of texts to validate int8; None for the built-in ones.

    Returns:
        The new manifest.

    Raises:
        CheckpointError: The file cannot be read, or has pairs, which the task does not support.
        DataError: The texts cannot validate int8; nothing is written then, nor after the next error.
        ParityError: The checkpoint is another one, or a graph does not agree with it.
    """
    manifest = bundle.manifest
    if manifest.source.weights_sha256 != checkpoint.weights_sha256:
        raise ParityError(
            f"the weights of `{checkpoint.source}` have sha256 {checkpoint.weights_sha256[:12]}…, but `{manifest.name}` "
            f"was made from {manifest.source.weights_sha256[:12]}…; give that checkpoint."
        )
    if differences := compare_settings(manifest, checkpoint):
        raise ParityError(f"{'; '.join(differences)}; give the checkpoint of `{manifest.name}`, or export it again.")
    tokenizer = Tokenizer(bundle.tokenizer_path, manifest.tokenizer)
    has_int8 = any(graph.precision == "int8" for graph in manifest.graphs)
    if validation is not None and not has_int8:
        raise DataError(f"`{manifest.name}` has no int8 graph, which --validation needs; remove --validation.")
    texts = report_texts(manifest, validation) if has_int8 else NO_TEXTS
    calibration.refuse_pairs((texts,), manifest.task, manifest.tokenizer)
    int8_texts = _replace_report(manifest.int8_texts, texts) if texts else None
    texts = texts.with_passages(tokenizer)
    reference = sample_reference(checkpoint, texts)
    graphs = tuple(_measure(bundle.path, graph, checkpoint, tokenizer, reference) for graph in manifest.graphs)
    source = manifest.source.model_copy(update=checkpoint.card_metadata)
    updated = Manifest.model_validate(
        manifest.model_copy(update={"graphs": graphs, "flops": checkpoint.flops, "source": source, "int8_texts": int8_texts}).model_dump()
    )
    _write(bundle.path, updated, checkpoint.card)
    return updated


def report_texts(manifest: Manifest, validation: Path | None) -> Texts:
    """Returns the texts to validate int8 again, without passages: those of the export if the file has them all, otherwise others.

    Args:
        manifest: Its entry `int8_texts` has the texts that were used to create int8. Without the entry, as in bundles of an older
            bert-export, it is unknown whether the texts are new to the graph.
        validation: A file; None for the built-in texts.

    Raises:
        CheckpointError: The file cannot be read.
        DataError: Some of the texts were used to create int8, or int8 was validated on texts other than the built-in ones.
    """
    int8_texts = manifest.int8_texts
    path = validation or calibration.BUILT_IN
    if int8_texts is None:
        return calibration.read_split(path).report if validation is None else calibration.report_texts(read_texts(path, "validation"))
    texts = read_texts(path, "validation")
    by_hash = {text_hash(text): text for text in texts}
    recorded = hashes_of(int8_texts.report)
    if all(hash_ in by_hash for hash_ in recorded):
        return calibration.Texts.of([by_hash[hash_] for hash_ in recorded])
    if validation is None:
        raise DataError(
            f"int8 of `{manifest.name}` was judged on {int8_texts.report.texts} texts of a file; give that file, or "
            "another one, with --validation."
        )
    int8_hashes = {hash_ for split in (int8_texts.calibration, int8_texts.gate) if split is not None for hash_ in hashes_of(split)}
    if shared := int8_hashes & by_hash.keys():
        raise DataError(
            f"int8 of `{manifest.name}` was made with {len(shared)} of the {len(texts)} texts of `{path}`, but "
            "must be judged on others; remove them."
        )
    return calibration.report_texts(texts)


def _replace_report(int8_texts: TextSplits | None, report: Texts) -> TextSplits:
    """Returns the manifest's entry with other texts of the validation report."""
    calibrated, gate = (None, None) if int8_texts is None else (int8_texts.calibration, int8_texts.gate)
    return TextSplits(calibration=calibrated, gate=gate, report=split_digest((*report.lines, *report.pairs)))


def _measure(folder: Path, graph: GraphSpec, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Reference) -> GraphSpec:
    """Returns a graph's manifest entry with a new validation report; facts about its creation are copied from the old one."""
    report = graph.evidence
    artifact = Artifact(
        folder / graph.file,
        graph.provider,
        graph.precision,
        graph.form,
        graph.inputs,
        shapes=graph.shapes,
        fusions=dict(report.fusions),
        quantized=dict(report.quantized),
        error=report.quantization_error,
    )
    new_graph, _ = measure_graph(artifact, checkpoint, tokenizer, reference, default=graph.default)
    return new_graph


def _write(folder: Path, manifest: Manifest, card: str | None) -> None:
    """Replaces both files, each as a whole; the card comes first, because the manifest is verified."""
    for name, text in ((CARD_FILE, model_card(manifest, folder, card)), (MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")):
        aside = folder / f".{name}"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, folder / name)

"""Measures the graphs of a finished bundle again and writes the new evidence into its manifest and card; graphs and tokenizer stay.

It is for bundles of an older bert-export, whose manifests lack tables that newer ones have, and for a speed table of one's own machine.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from bertserve.export import calibration
from bertserve.export.artifact import Artifact
from bertserve.export.bundle.card import model_card
from bertserve.export.calibration import Texts
from bertserve.export.checkpoint.checkpoint import Checkpoint
from bertserve.export.errors import DataError, ParityError
from bertserve.export.evidence.measure import measure_graph
from bertserve.export.evidence.reference import NO_TEXTS, Reference, sample_reference
from bertserve.export.text_files import hashes_of, read_texts, split_digest, text_hash
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, Bundle
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest, TextSplits
from bertserve.service.text.tokenizer import Tokenizer


def remeasure(bundle: Bundle, checkpoint: Checkpoint, validation: Path | None = None) -> Manifest:
    """Compares all graphs with the checkpoint again, times them, and writes the new manifest and card.

    Args:
        bundle: The loaded bundle.
        checkpoint: The checkpoint that it was made from.
        validation: A file of texts to judge int8 on; None for the built-in ones.

    Returns:
        The new manifest.

    Raises:
        CheckpointError: The file cannot be read, or holds pairs that the task does not take.
        DataError: The texts are none to judge int8 on; nothing is written then. The same is so of the next one.
        ParityError: The checkpoint is another one, or a graph does not answer as it does.
    """
    manifest = bundle.manifest
    if manifest.source.weights_sha256 != checkpoint.weights_sha256:
        raise ParityError(
            f"the weights of `{checkpoint.source}` have sha256 {checkpoint.weights_sha256[:12]}…, those that `{manifest.name}` was made from "
            f"{manifest.source.weights_sha256[:12]}…; give the checkpoint that it was made from."
        )
    tokenizer = Tokenizer(bundle.tokenizer_path, manifest.tokenizer)
    has_int8 = any(graph.precision == "int8" for graph in manifest.graphs)
    if validation is not None and not has_int8:
        raise DataError(f"`{manifest.name}` has no int8 graph, and --validation gives texts to judge int8 on; leave it out.")
    texts = report_texts(manifest, validation) if has_int8 else NO_TEXTS
    calibration.refuse_pairs((texts,), manifest.task)
    int8_texts = _replace_report(manifest.int8_texts, texts) if texts else None
    texts = texts.with_passages(tokenizer)
    reference = sample_reference(checkpoint, texts)
    graphs = tuple(_measure(bundle.path, graph, checkpoint, tokenizer, reference) for graph in manifest.graphs)
    source = manifest.source.model_copy(update=asdict(checkpoint.card_metadata))
    updated = Manifest.model_validate(
        manifest.model_copy(update={"graphs": graphs, "flops": checkpoint.flops, "source": source, "int8_texts": int8_texts}).model_dump()
    )
    _write(bundle.path, updated, checkpoint.card)
    return updated


def report_texts(manifest: Manifest, validation: Path | None) -> Texts:
    """Returns the texts to judge int8 on again, without passages: those of the export where the file has them all, or others.

    Args:
        manifest: Its entry `int8_texts` says which texts int8 was made with. Without the entry, as in bundles of an older bert-export, nothing
            tells whether the texts are new to the graph.
        validation: A file; None for the built-in texts.

    Raises:
        CheckpointError: The file cannot be read.
        DataError: int8 was made with some of the texts, or judged on others than the built-in ones.
    """
    made = manifest.int8_texts
    path = validation or calibration.BUILT_IN
    if made is None:
        return calibration.read_split(path).report if validation is None else calibration.report_texts(read_texts(path, "validation"))
    texts = read_texts(path, "validation")
    by_hash = {text_hash(text): text for text in texts}
    recorded = hashes_of(made.report)
    if all(hash_ in by_hash for hash_ in recorded):
        return calibration.Texts.of([by_hash[hash_] for hash_ in recorded])
    if validation is None:
        raise DataError(
            f"int8 of `{manifest.name}` was judged on {made.report.texts} texts of a file; give that file, or one of other texts, with --validation."
        )
    seen = {hash_ for split in (made.calibration, made.gate) if split is not None for hash_ in hashes_of(split)}
    if shared := seen & by_hash.keys():
        raise DataError(
            f"int8 of `{manifest.name}` was made with {len(shared)} of the {len(texts)} texts of `{path}`, and must be judged on others; remove them."
        )
    return calibration.report_texts(texts)


def _replace_report(made: TextSplits | None, report: Texts) -> TextSplits:
    """Returns the entry of the manifest with other texts that int8 was judged on."""
    calibrated, gate = (None, None) if made is None else (made.calibration, made.gate)
    return TextSplits(calibration=calibrated, gate=gate, report=split_digest((*report.lines, *report.pairs)))


def _measure(folder: Path, graph: GraphSpec, checkpoint: Checkpoint, tokenizer: Tokenizer, reference: Reference) -> GraphSpec:
    """Returns the manifest entry of a graph with new evidence; how it was made is copied from the old one."""
    known = graph.evidence
    artifact = Artifact(
        folder / graph.file,
        graph.provider,
        graph.precision,
        graph.form,
        graph.inputs,
        shapes=graph.shapes,
        fusions=dict(known.fusions),
        quantized=dict(known.quantized),
        error=known.quantization_error,
    )
    measured, _ = measure_graph(artifact, checkpoint, tokenizer, reference, default=graph.default)
    return measured


def _write(folder: Path, manifest: Manifest, card: str | None) -> None:
    """Replaces both files, each whole or not at all; the card first, because the manifest is what is verified."""
    sizes = {graph.file: sum((folder / file.file).stat().st_size for file in graph.files) for graph in manifest.graphs}
    for name, text in ((CARD_FILE, model_card(manifest, sizes, card)), (MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")):
        aside = folder / f".{name}"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, folder / name)

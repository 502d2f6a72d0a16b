"""Measures the graphs of a finished bundle again and writes the new evidence into its manifest and card; graphs and tokenizer stay.

It is for bundles of an older bert-export, whose manifests lack tables that newer ones have, and for a speed table of one's own machine.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from export import calibration
from export.artifact import Artifact
from export.bundle.card import model_card
from export.checkpoint.checkpoint import Checkpoint
from export.errors import ParityError
from export.evidence.measure import measure_graph
from export.evidence.reference import NO_TEXTS, Reference, sample_reference
from service.bundle.files import CARD_FILE, MANIFEST_FILE, Bundle
from service.bundle.graph_spec import GraphSpec
from service.bundle.manifest import Manifest
from service.text.tokenizer import Tokenizer


def remeasure(bundle: Bundle, checkpoint: Checkpoint) -> Manifest:
    """Compares all graphs with the checkpoint again, times them, and writes the new manifest and card.

    Args:
        bundle: The loaded bundle.
        checkpoint: The checkpoint that it was made from.

    Returns:
        The new manifest.

    Raises:
        ParityError: The checkpoint is another one, or a graph does not answer as it does; nothing is written then.
    """
    manifest = bundle.manifest
    if manifest.source.weights_sha256 != checkpoint.weights_sha256:
        raise ParityError(
            f"the weights of `{checkpoint.source}` have sha256 {checkpoint.weights_sha256[:12]}…, those that `{manifest.name}` was made from "
            f"{manifest.source.weights_sha256[:12]}…; give the checkpoint that it was made from."
        )
    has_int8 = any(graph.precision == "int8" for graph in manifest.graphs)
    tokenizer = Tokenizer(bundle.tokenizer_path, manifest.tokenizer)
    texts = calibration.read_split(calibration.BUILT_IN).validation.with_passages(tokenizer) if has_int8 else NO_TEXTS
    reference = sample_reference(checkpoint, texts)
    graphs = tuple(_measure(bundle.path, graph, checkpoint, tokenizer, reference) for graph in manifest.graphs)
    source = manifest.source.model_copy(update=asdict(checkpoint.card_metadata))
    updated = Manifest.model_validate(
        manifest.model_copy(update={"graphs": graphs, "flops": checkpoint.flops, "source": source}).model_dump()
    )
    _write(bundle.path, updated, checkpoint.card)
    return updated


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

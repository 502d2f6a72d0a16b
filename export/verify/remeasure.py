"""Measures the graphs of a finished bundle again and writes that into its manifest and card; graphs and tokenizer stay.

For bundles of an older bert-export, whose manifests lack tables that newer ones have, and for a speed table of one's own machine.
"""

from __future__ import annotations

import os
from pathlib import Path

from export.artifact import Artifact
from export.bundle.card import model_card
from export.checkpoint.load import Checkpoint
from export.errors import ParityError
from export.evidence import measure, parity, samples
from service.bundle.files import CARD_FILE, MANIFEST_FILE, Bundle
from service.bundle.graph_spec import GraphSpec
from service.bundle.manifest import Manifest
from service.text.tokenizer import Tokenizer


def remeasure(bundle: Bundle, loaded: Checkpoint) -> Manifest:
    """Compares all graphs with the checkpoint again, times them, and writes the new manifest and card.

    Args:
        bundle: The loaded bundle.
        loaded: The checkpoint that it was made from.

    Returns:
        The new manifest.

    Raises:
        ParityError: The checkpoint is another one, or a graph does not answer as it does; nothing is written then.
    """
    manifest = bundle.manifest
    if manifest.source.weights_sha256 != loaded.weights_sha256:
        raise ParityError(
            f"the weights of `{loaded.source}` have sha256 {loaded.weights_sha256[:12]}…, those that `{manifest.name}` was made from "
            f"{manifest.source.weights_sha256[:12]}…; give the checkpoint that it was made from."
        )
    reference = parity.Reference(loaded, samples.samples(loaded.task, loaded.max_length, loaded.mask.token if loaded.mask else None))
    tokenizer = Tokenizer(bundle.tokenizer_path, manifest.tokenizer)
    graphs = tuple(_measured(bundle.path, graph, loaded, tokenizer, reference) for graph in manifest.graphs)
    renewed = Manifest.model_validate(manifest.model_copy(update={"graphs": graphs, "flops": loaded.flops}).model_dump())
    _write(bundle.path, renewed, loaded.card)
    return renewed


def _measured(folder: Path, graph: GraphSpec, loaded: Checkpoint, tokenizer: Tokenizer, reference: parity.Reference) -> GraphSpec:
    known = graph.evidence
    made = Artifact(
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
    measured, _ = measure.measure(made, loaded, tokenizer, reference, default=graph.default)
    return measured


def _write(folder: Path, manifest: Manifest, card: str | None) -> None:
    """Writes both files anew, each whole or not at all, the card first: the manifest is what is verified."""
    sizes = {graph.file: sum((folder / file.file).stat().st_size for file in graph.files) for graph in manifest.graphs}
    for name, text in ((CARD_FILE, model_card(manifest, sizes, card)), (MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")):
        aside = folder / f".{name}"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, folder / name)

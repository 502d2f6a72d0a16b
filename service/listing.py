"""The command `bert-serve models`: describes the models of a folder from their manifests, as a table or as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertserve.service.bundle.files import CARD_FILE, read_manifest
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.validation_policy import summarize_agreement
from bertserve.service.errors import StartError

_HEADER = ("name", "task", "labels", "MiB", "graphs (* default), answers as the checkpoint", "card")


def describe(path: Path) -> dict[str, Any]:
    """Returns the facts in the manifest of a bundle's folder, or the reason why it cannot be read as `error`."""
    try:
        manifest, _ = read_manifest(path)
        graphs = [_describe_graph(path, graph) for graph in manifest.graphs]
    except (StartError, OSError) as error:
        return {"name": path.name, "path": str(path), "error": str(error)}
    card = path / CARD_FILE
    return {
        "name": manifest.name,
        "path": str(path),
        "task": manifest.task,
        "labels": list(manifest.labels),
        "size_bytes": sum(file.stat().st_size for file in path.iterdir() if file.is_file()),
        "graphs": graphs,
        "source": manifest.source.model_dump(include={"checkpoint", "revision", "commit"}),
        "card": str(card) if card.is_file() else None,
    }


def as_table(descriptions: Sequence[dict[str, Any]]) -> str:
    """Returns a table with a line per model; the errors of unreadable manifests are on separate lines below."""
    rows = [_HEADER, *(_row(model) for model in descriptions if "error" not in model)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *(f"{model['name']}: {model['error']}" for model in descriptions if "error" in model)])


def _describe_graph(path: Path, graph: GraphSpec) -> dict[str, Any]:
    agreement = graph.validation.agreement
    return {
        **graph.model_dump(include={"file", "provider", "precision", "default", "batch_invariant"}),
        "size_bytes": sum((path / file.file).stat().st_size for file in graph.files),
        "samples": graph.validation.samples,
        "measure": None if agreement is None else agreement.measure,
        "agreement": None if agreement is None else agreement.value,
        "decisions": None if agreement is None else agreement.decisions,
        "summary": summarize_agreement(agreement),
        "measured_on": graph.validation.provider,
    }


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    labels, size = model["labels"], f"{model['size_bytes'] / 2**20:.1f}"
    label_text = ", ".join(label[:24] for label in labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")
    graphs = (f"{graph['provider']}/{graph['precision']}{'*' if graph['default'] else ''} {graph['summary']}" for graph in model["graphs"])
    return model["name"], model["task"], label_text, size, "; ".join(graphs), model["card"] or "none"

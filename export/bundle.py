"""Writes a bundle: manifest, model card, and the rename to its final place. A bundle exists either completely or not at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from huggingface_hub import ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from bertserve.export.calibration_card import card_texts
from bertserve.export.errors import OutputError
from bertserve.export.workspace import ignore_signals
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE, TOKENIZER_FILE
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest, Source
from bertserve.service.bundle.validation_policy import describe_agreement, has_low_agreement, summarize_agreement
from bertserve.service.errors import plural

CARD_FIELDS = {"license", "license_name", "license_link", "language", "datasets"}  # of `Source`, from the card of the checkpoint
# the hidden ones are those of a killed `verify --update`, or of a file manager
_BUNDLE_FILES = {MANIFEST_FILE, TOKENIZER_FILE, CARD_FILE, f".{MANIFEST_FILE}", f".{CARD_FILE}", ".DS_Store"}
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")  # start or end of a code block
_TOKEN_TYPES = {
    "template": "- token types (segment ids): those of the tokenizer's template",
    "zero": "- token types (segment ids): none, so the second text of a pair has the type of the first one",
}


def refuse_existing(target: Path, *, overwrite: bool) -> None:
    """Refuses an existing target, before minutes of work. A folder with other files than those of a bundle is never replaced."""
    if not os.path.lexists(target):
        return
    files = sorted(target.iterdir()) if target.is_dir() and not target.is_symlink() else []
    is_bundle = any(file.name == MANIFEST_FILE for file in files)
    for file in files:
        is_known = file.name in _BUNDLE_FILES or file.name.endswith((".onnx", ".onnx.data", ".svg"))
        if not is_bundle or not is_known or file.is_dir():
            raise OutputError(
                f"`{target}` exists and has `{file.name}`, which is not part of a bundle; move it, or choose another --output."
            )
    if not overwrite:
        raise OutputError(f"`{target}` exists; choose another --output, or give --overwrite to replace it.")


def package_bundle(folder: Path, target: Path, texts: Mapping[str, str]) -> None:
    """Adds manifest and card to the bundle in `folder`, which is on the target's file system, and renames it to `target`.

    An existing bundle, file or link at the target is renamed first and deleted last.
    """
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    folder.chmod(0o755)  # tempfile creates it as private, but another user may run the service
    aside = target.with_name(f".{target.name}.old")
    with ignore_signals():
        try:
            if os.path.lexists(target):
                _remove(aside)
                target.rename(aside)
            folder.rename(target)
        except BaseException:  # after any failure, the old bundle is restored
            if os.path.lexists(aside) and not os.path.lexists(target):
                aside.rename(target)
            raise
        with suppress(OSError):  # the new bundle is in place; remains of the old one are hidden, and the next export removes them
            _remove(aside)


def bundle_texts(manifest: Manifest, card: str) -> dict[str, str]:
    """Returns a card with the section about its calibration, the diagrams of this section, and the manifest, by file name."""
    return card_texts(card, manifest.graphs) | {MANIFEST_FILE: manifest.model_dump_json(indent=1) + "\n"}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def model_card(manifest: Manifest, folder: Path, card: str | None) -> str:
    """Returns the bundle's README.md in Markdown; it quotes the checkpoint's own card, if any."""
    sections = [
        [f"# {manifest.name}", "", _summary(manifest)],
        _embedding(manifest),
        _attention(manifest),
        ["## Graphs and validation", "", *_graph_table(manifest, folder)],
        [
            f"**Warning:** graph {graph.name}: {describe_agreement(graph.validation)}. Measure it on your own texts before you use it."
            for graph in manifest.graphs
            if has_low_agreement(graph)
        ],
        [f"**There is no graph {graph.provider}/{graph.precision}.** Its export failed: {graph.reason}" for graph in manifest.omitted],
        _error_table(manifest.graphs, manifest.tokenizer.max_length),
        _speed_table(manifest.graphs),
        _metric_table(manifest),
        _origin(manifest),
        _quote(card),
    ]
    return _front_matter(manifest.source) + "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _front_matter(source: Source) -> str:
    """Returns license, language and data sets of the checkpoint's card, in the hub's format."""
    fields = source.model_dump(include=CARD_FIELDS, mode="json")
    metadata = {name: value[0] if name == "license" and len(value) == 1 else value for name, value in fields.items() if value}
    return f"---\n{ModelCardData(**metadata).to_yaml()}\n---\n" if metadata else ""


def _summary(manifest: Manifest) -> str:
    source = manifest.source
    labels = f" with the labels {', '.join(f'`{label}`' for label in manifest.labels)}" if manifest.labels else ""
    revision = f" at `{source.revision}`" if source.revision else ""
    return (
        f"This is a bertserve bundle for {manifest.task}{labels}. The model reads up to {manifest.tokenizer.max_length} tokens. "
        f"bert-export {source.versions['bertserve']} made the bundle from the checkpoint `{source.checkpoint}`{revision}."
    )


def _embedding(manifest: Manifest) -> list[str]:
    if manifest.embedding is None:
        return []
    embedding = manifest.embedding
    layers = ""
    if embedding.layers == "last_four":
        layers = f" On request, a vector has the last four layers side by side: {4 * embedding.dimensions} values."
    elif embedding.layers != "last":
        layers = f" On request, a vector has the layers {', '.join(map(str, embedding.layers))} side by side, or their sum or mean."
    if embedding.default_layers is not None:
        layers += f" The default layers are {', '.join(map(str, embedding.default_layers))} ({embedding.combine})."
    prompts = "".join(
        f" The{' default' if name == embedding.default_prompt else ''} prompt `{name}` is `{text}`."
        for name, text in embedding.prompts.items()
    )
    normalized = "normalized to length 1" if embedding.normalize else "not normalized"
    values = embedding.vector_dimensions or embedding.dimensions
    truncation = (
        f", of which the first {embedding.truncate_dim} are kept" if embedding.truncate_dim and embedding.truncate_dim < values else ""
    )
    similarity = "" if embedding.similarity == "cosine" else f" Their similarity is `{embedding.similarity}`."
    return [
        f"Vectors have {values} values{truncation}, with the pooling `{embedding.pooling}`, and are {normalized}."
        f"{similarity}{layers}{prompts}"
    ]


def _attention(manifest: Manifest) -> list[str]:
    if not manifest.attention_heads:
        return []
    errors = [
        f"{graph.name} {graph.validation.attention_error:.1e}" for graph in manifest.graphs if graph.validation.attention_error is not None
    ]
    return [
        f"`POST /attention` returns the attention of {sum(manifest.attention_heads)} heads in {len(manifest.attention_heads)} layers. The "
        f"largest difference of a weight from PyTorch is: {', '.join(errors)}."
    ]


def _graph_table(manifest: Manifest, folder: Path) -> list[str]:
    header = ["graph", "provider", "precision", "MiB", "batch-invariant", "largest difference of an output from PyTorch"]
    rows = [
        [
            f"`{graph.file}`{' (default)' if graph.default else ''}",
            graph.provider,
            graph.precision,
            f"{sum((folder / file.file).stat().st_size for file in graph.files) / 2**20:.1f}",
            "yes" if graph.batch_invariant else "no",
            f"{graph.validation.worst_abs_error:.1e}",
            summarize_agreement(graph.validation.agreement),
            f"{graph.validation.worst_batch_error:.1e}",
        ]
        for graph in manifest.graphs
    ]
    return [
        *_table([*header, "agreement with PyTorch", "row in a batch and alone: largest difference"], rows),
        "",
        "Agreement is the share of samples with the same answer, or the measure that the cell names, with the number of samples.",
        "",
        "If a graph is batch-invariant, a text has the same scores in every batch. The service runs other graphs one text at a time.",
        "",
        *(f"- {_describe_graph(graph)}" for graph in manifest.graphs),
    ]


def _describe_graph(graph: GraphSpec) -> str:
    """Returns a graph's description, its fused and quantized operators, and the number of matrices with too few texts for GPTQ."""
    validation = graph.validation
    fused, quantized = (
        ", ".join(f"{name} {count}" for name, count in counts.items()) for counts in (validation.fusions, validation.quantized)
    )
    text = f"{graph.name}: {graph.description}; {validation.nodes} nodes; fused {fused or 'nothing'}"
    text += f"; quantized {quantized}" if quantized else ""
    if quantized and validation.quantization_error:
        text += f", which changes the outputs by {validation.quantization_error:.3f} of their standard deviation"
    if nearest_count := validation.quantized.get("RoundedToNearest", 0):
        verb = "is" if nearest_count == 1 else "are"
        text += f"; {nearest_count} of these matrices {verb} rounded without GPTQ, because of too few calibration texts"
    return f"{text}."


def _error_table(graphs: Sequence[GraphSpec], max_length: int) -> list[str]:
    """Returns the parity table by length, with the largest absolute and relative errors."""
    with_table = [graph for graph in graphs if graph.validation.lengths]
    if not with_table:
        return []
    entries = {(graph.name, entry.up_to): entry for graph in with_table for entry in graph.validation.lengths}
    # int8 is compared on more texts than other precisions
    counts: dict[int, dict[str, None]] = {}  # up_to -> distinct numbers of rows, in order
    for (_, up_to), entry in entries.items():
        counts.setdefault(up_to, {})[str(entry.rows)] = None
    names = [graph.name for graph in with_table]
    longest = max(graph.validation.longest or 0 for graph in with_table)
    sentence = f" The longest row that was compared has {longest} tokens, and the model takes {max_length}." if longest else ""
    rows = [
        [f"up to {up_to}", ", ".join(counts[up_to])]
        + [f"{e.worst_abs_error:.1e}, {e.worst_rel_error:.1e}" if (e := entries.get((name, up_to))) else "" for name in names]
        for up_to in sorted(counts)
    ]
    return [
        "### Errors by length",
        "",
        "Each cell has the largest difference of an output from the checkpoint in PyTorch float32, and its ratio to the largest output of "
        "the row." + sentence,
        "",
        *_table(["tokens", "rows", *names], rows),
    ]


def _speed_table(graphs: Sequence[GraphSpec]) -> list[str]:
    speeds = [(graph.name, graph.validation.speed) for graph in graphs if graph.validation.speed]
    if len(speeds) < 2:  # times of other exports are from other machines and loads
        return []
    (_, first), *_ = speeds
    by_length = zip(*(speed.timings for _, speed in speeds), strict=True)
    rows = [[str(timings[0].length), *(f"{timing.median_ms:.1f}" for timing in timings)] for timings in by_length]
    return [
        "### Speed at export",
        "",
        f"Each cell has the median milliseconds of one text with {plural(first.threads, 'thread')} on {first.cpu} "
        f"({', '.join(first.instructions) or 'instruction sets unknown'}). Use them to compare graphs only: they are from a few runs.",
        "",
        *_table(["tokens", *(name for name, _ in speeds)], rows),
    ]


def _metric_table(manifest: Manifest) -> list[str]:
    if not manifest.metrics:
        return []
    names = sorted({name for metric in manifest.metrics for name in metric.graphs})
    rows = [
        [metric.name, f"{metric.checkpoint:.4f}", *(f"{metric.graphs[n]:.4f}" if n in metric.graphs else "" for n in names)]
        for metric in manifest.metrics
    ]
    return ["## Metrics", "", *_table(["metric", "checkpoint (PyTorch, fp32)", *names], rows)]


def _origin(manifest: Manifest) -> list[str]:
    source = manifest.source
    facts = [f"checkpoint `{source.checkpoint}`"]
    if source.commit:
        facts.append(f"commit `{source.commit}`")
    facts.append(f"sha256 over its weights `{source.weights_sha256}`")
    if source.weights_format == "pickle":
        facts.append("which were pickled and read with `torch.load(weights_only=True)`")
    opsets = {graph.validation.opset for graph in manifest.graphs} - {None}
    versions = [f"{name} {version}" for name, version in source.versions.items()]
    return [
        "## Origin",
        "",
        f"- {', '.join(facts)}",
        *([_TOKEN_TYPES[source.token_types]] if source.token_types else []),
        f"- exported with {', '.join(versions)}" + (f"; ONNX opset {', '.join(map(str, sorted(opsets, key=str)))}" if opsets else ""),
        *(f"- `{file.file}` sha256 `{file.sha256}`" for graph in manifest.graphs for file in graph.files),
        "",
        f"`bert-export verify path/to/{manifest.name}` compares the files with their digests, and the graphs with the stored example. "
        "With `--checkpoint CHECKPOINT` it compares them with PyTorch again, and with `--data FILE` it measures them on your labeled "
        "texts.",
    ]


def _quote(card: str | None) -> list[str]:
    """Returns the checkpoint's own card without its front matter, with its headings one level lower."""
    if not card:
        return []
    return ["The checkpoint has this card:", "", *_lower_headings(REGEX_YAML_BLOCK.sub("", card).strip().split("\n"))]


def _lower_headings(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines of Markdown with their headings one level lower; a comment in a block of code is not a heading."""
    fence = ""  # of the open block
    for line in lines:
        match = _FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence) and line.strip() == match[1]:
            fence = ""
        yield f"#{line}" if line.startswith("#") and not fence else line


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]

"""Writes a bundle's model card from its manifest, and the reliability diagrams of its calibrated graphs."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from huggingface_hub import ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from bertserve.export.checkpoint.card import CARD_FIELDS
from bertserve.export.flags import Aim
from bertserve.service.bundle.calibration import Bin, Calibration, Interval, Threshold
from bertserve.service.bundle.files import CARD_FILE, MANIFEST_FILE
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest, Source
from bertserve.service.bundle.validation_policy import describe_agreement, has_low_agreement, summarize_agreement
from bertserve.service.messages import plural

_FLOAT_KEYS = {"FloatUnits", "FloatInputs", "KeptFloat"}  # parts of `quantized` that stay in float, partly or wholly
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")  # start or end of a code block
_TOKEN_TYPES = {
    "template": "- token types (segment ids): those of the tokenizer's template",
    "zero": "- token types (segment ids): none, so the second text of a pair has the type of the first one",
}
_QUOTE_START = "The checkpoint has this card:\n\n"  # the rest of a bundle's card is the checkpoint's own card
# scores and shares go from 0 to 100, at 3 pixels each; y grows downwards
DIAGRAM = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -12 124 128" width="372" height="384" \
font-family="sans-serif" font-size="5">
<rect x="-12" y="-12" width="124" height="128" fill="#fff"/>
<path d="M0 0H100V100H0ZM0 100L100 0" fill="none" stroke="#888" stroke-width="0.4"/>
<g fill="none" stroke-linecap="round"><path d="M{raw}" stroke="#c50"/><path d="M{calibrated}" stroke="#06c"/></g>
<text x="0" y="-4">share of correct predictions: <tspan fill="#c50">raw</tspan>, <tspan fill="#06c">calibrated</tspan></text>
<text x="-2" y="2" text-anchor="end">1</text><text x="-2" y="106" text-anchor="end">0</text>
<text x="50" y="107" text-anchor="middle">score</text><text x="100" y="107" text-anchor="middle">1</text>
</svg>
"""


def bundle_texts(manifest: Manifest, folder: Path, checkpoint_card: str) -> dict[str, str]:
    """Returns a bundle's card, a reliability diagram in SVG for each calibrated graph, and the manifest, by file name.

    `folder` contains the graphs, and `checkpoint_card` is the result of `quote` or `read_quote`.
    """
    diagrams = {
        _diagram_file(graph): DIAGRAM.format(raw=_line(calibration.before.bins), calibrated=_line(calibration.after.bins))
        for graph in manifest.graphs
        if (calibration := graph.calibration) is not None
    }
    card = model_card(manifest, folder, checkpoint_card)
    return diagrams | {CARD_FILE: card, MANIFEST_FILE: manifest.model_dump_json(indent=1) + "\n"}


def model_card(manifest: Manifest, folder: Path, checkpoint_card: str = "") -> str:
    """Returns the bundle's README.md in Markdown; with the arguments of `bundle_texts`."""
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
        _calibrations(manifest.graphs),
        _origin(manifest),
        [f"{_QUOTE_START}{checkpoint_card}"] if checkpoint_card else [],
    ]
    return _front_matter(manifest.source) + "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def measurements(manifest: Manifest, folder: Path) -> str:
    """Returns the card's tables about graphs, errors by length and speed, in Markdown; `folder` contains the graphs."""
    tables = (
        _graph_table(manifest, folder),
        _error_table(manifest.graphs, manifest.tokenizer.max_length),
        _speed_table(manifest.graphs),
    )
    return "\n\n".join("\n".join(lines) for lines in tables if lines)


def quote(card: str | None) -> str:
    """Returns the checkpoint's own card without its front matter, with its headings one level lower; empty without a card."""
    return "\n".join(_lower_headings(REGEX_YAML_BLOCK.sub("", card or "").strip().split("\n")))


def read_quote(path: Path) -> str:
    """Returns the checkpoint's card in a bundle's card; empty if there is none."""
    return path.read_text(encoding="utf-8").partition(_QUOTE_START)[2].rstrip("\n") if path.exists() else ""


def _front_matter(source: Source) -> str:
    """Returns license, language and data sets of the checkpoint's card, in the hub's format."""
    fields = source.model_dump(include={*CARD_FIELDS}, mode="json")
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
    settings = manifest.embedding.model_dump(mode="json", exclude_defaults=True)
    return ["How vectors are made, by the names of the manifest:", "", *(f"- `{name}`: {json.dumps(settings[name])}" for name in settings)]


def _attention(manifest: Manifest) -> list[str]:
    if not manifest.attention_heads:
        return []
    errors = [f"{graph.name} {error:.1e}" for graph in manifest.graphs if (error := graph.validation.attention_error) is not None]
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
    """Returns a graph's description, and its fused and quantized operators."""
    validation = graph.validation
    fused, quantized = (
        [f"{name} {count}" for name, count in counts.items() if name not in _FLOAT_KEYS]
        for counts in (validation.fusions, validation.quantized)
    )
    in_float = [f"{name} {count}" for name, count in validation.quantized.items() if name in _FLOAT_KEYS]
    text = f"{graph.name}: {graph.description}; {validation.nodes} nodes; fused {', '.join(fused) or 'nothing'}"
    text += f"; quantized {', '.join(quantized)}" if quantized else ""
    text += f"; partly or wholly in float {', '.join(in_float)}" if in_float else ""
    if quantized and validation.quantization_error:
        text += f"; its precision changes the outputs by {validation.quantization_error:.3f} of their standard deviation"
    return f"{text}."


def _error_table(graphs: Sequence[GraphSpec], max_length: int) -> list[str]:
    """Returns the parity table by length, with the largest absolute and relative errors."""
    with_table = [graph for graph in graphs if graph.validation.lengths]
    if not with_table:
        return []
    entries = {(graph.name, entry.up_to): entry for graph in with_table for entry in graph.validation.lengths}
    names = [graph.name for graph in with_table]
    longest = max(graph.validation.longest or 0 for graph in with_table)
    sentence = f" The longest row that was compared has {longest} tokens, and the model takes {max_length}." if longest else ""
    rows = []
    for up_to in sorted({up_to for _, up_to in entries}):
        counts = sorted({entry.rows for (_, other), entry in entries.items() if other == up_to})  # int8 is compared on more texts
        cells = [f"{e.worst_abs_error:.1e}, {e.worst_rel_error:.1e}" if (e := entries.get((name, up_to))) else "" for name in names]
        rows.append([f"up to {up_to}", ", ".join(map(str, counts)), *cells])
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


def _lower_headings(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines of Markdown with their headings one level lower; a comment in a block of code is not a heading."""
    fence = ""  # the fence of the open block
    for line in lines:
        match = _FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence) and line.strip() == match[1]:
            fence = ""
        yield f"#{line}" if line.startswith("#") and not fence else line


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def _calibrations(graphs: Sequence[GraphSpec]) -> list[str]:
    lines = []
    for graph in graphs:
        if graph.calibration is not None:
            diagram = f"![Share of correct predictions by score]({_diagram_file(graph)})"
            lines += ["", "```", f"{graph.name}: {describe_calibration(graph.calibration)}", "```", "", diagram]
    return ["## Calibration", *lines] if lines else []


def _diagram_file(graph: GraphSpec) -> str:
    return f"reliability.{graph.provider}.{graph.precision}.svg"


def describe_calibration(calibration: Calibration) -> str:
    """Returns parameters, numbers of examples, measures with 95 % intervals for raw and for calibrated scores, and thresholds."""
    has_lines = len(calibration.scale) > 1 or any(calibration.bias)
    parameters = "scale and bias of each label" if has_lines else f"temperature {1 / calibration.scale[0]:.3g}"
    measures = {"log_loss": "log loss", "brier": "Brier score", "ece": "ECE", "auroc": "AUROC"}
    return "\n  ".join(
        [
            f"{parameters}, fitted on {calibration.fitted} examples and tested on {calibration.tested} others",
            *(
                f"{text:<11} {_interval(getattr(calibration.before, name))} -> {_interval(getattr(calibration.after, name))}"
                for name, text in measures.items()
            ),
            *map(_describe_threshold, calibration.thresholds),
        ]
    )


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def _describe_threshold(threshold: Threshold) -> str:
    aim = Aim(threshold.aim, threshold.target, threshold.label)
    errors = {"recall": "correct ones are below it", "coverage": "label sets lack the correct label"}
    return (
        f"`{aim}`: scores of at least {threshold.threshold:.4f} decide {threshold.decided:.1%}; {threshold.error:.2%} of "
        f"{threshold.examples} {errors.get(threshold.aim, 'decided are wrong')}, at most {aim.max_error:.2%} at 95 % confidence"
    )


def _line(bins: Sequence[Bin]) -> str:
    """Returns the commands of a path; the last one makes a dot of a single bin."""
    return "L".join(f"{100 * bin_.score:.1f} {100 * (1 - bin_.correct):.1f}" for bin_ in bins) + "h0"

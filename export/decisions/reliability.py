"""The section about calibration in a bundle's card, and its reliability diagrams."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bertserve.export.decisions.thresholds import Aim
from bertserve.service.bundle.decision import Bin, Decision, Interval, Threshold
from bertserve.service.bundle.graph_spec import GraphSpec
from bertserve.service.bundle.manifest import Manifest

HEADING = "## Calibration"
_SIZE, _MARGIN = 260, 40  # of a diagram, in pixels


def diagram_name(graph: GraphSpec) -> str:
    """Returns the name of a graph's diagram in the bundle."""
    return f"reliability.{graph.provider}.{graph.precision}.svg"


def diagrams(manifest: Manifest) -> dict[str, str]:
    """Returns the reliability diagram of each calibrated graph as SVG, by file name."""
    return {diagram_name(graph): _diagram(graph.decision) for graph in manifest.graphs if graph.decision is not None}


def _section(graphs: Sequence[GraphSpec]) -> str:
    lines = [HEADING, ""]
    for graph in graphs:
        if (decision := graph.decision) is None:
            continue
        lines += [
            f"Graph {graph.name}: {describe(decision)}. Values with 95 % intervals:",
            "",
            "| measure | raw scores | calibrated scores |",
            "| --- | --- | --- |",
            *(f"| {name} | {raw} | {calibrated} |" for name, raw, calibrated in qualities(decision)),
            "",
            f"![Share of correct predictions by score]({diagram_name(graph)})",
            "",
            *(f"- {describe_threshold(threshold)}" for threshold in decision.thresholds),
            *([""] if decision.thresholds else []),
        ]
    return "\n".join(lines)


def describe(decision: Decision) -> str:
    """Returns the parameters and the numbers of examples as text."""
    parameters = f"temperature {decision.temperature:.3g}"
    if decision.method == "per-label" and (len(decision.scale) > 1 or any(decision.bias)):
        parameters = "scale and bias of each label"
    elif any(decision.bias):
        parameters += f', offset {decision.bias[0]:+.3g} of "no answer"'
    return f"{parameters}, fitted on {decision.fitted} examples and judged on {decision.judged} others"


def qualities(decision: Decision) -> list[tuple[str, str, str]]:
    """Returns the name of each measure, and its values with intervals for raw and for calibrated scores as text."""
    names = {"log_loss": "log loss", "brier": "Brier score", "ece": "ECE", "auroc": "AUROC"}
    return [(text, _interval(getattr(decision.before, name)), _interval(getattr(decision.after, name))) for name, text in names.items()]


def _interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.4f} [{interval.low:.4f}, {interval.high:.4f}]"


def describe_threshold(threshold: Threshold) -> str:
    """Returns what a threshold decides and promises."""
    aim = Aim(threshold.aim, threshold.target, threshold.label)
    errors = {"recall": "correct ones are below it", "coverage": "label sets lack the correct label"}.get(
        threshold.aim, "decided are wrong"
    )
    return (
        f"`{aim}`: scores from {threshold.threshold:.4f} on decide {threshold.decided:.1%}; {threshold.error:.2%} of {threshold.examples} "
        f"{errors}, at most {aim.error:.2%} at 95 % confidence"
    )


def with_section(card: str, graphs: Sequence[GraphSpec]) -> str:
    """Returns a card with the section in place of its own one, or before its section "Origin"."""
    without = re.sub(rf"^{HEADING}\n.*?(?=^## |\Z)", "", card, flags=re.MULTILINE | re.DOTALL)
    before, origin, after = without.partition("## Origin\n")
    return f"{before.rstrip()}\n\n{_section(graphs)}\n{origin}{after}".rstrip() + "\n"


def _diagram(decision: Decision) -> str:
    """Returns an SVG: the share of correct predictions by their mean score, for raw and for calibrated scores."""
    full = _SIZE + 2 * _MARGIN
    axis = f'<rect x="{_MARGIN}" y="{_MARGIN}" width="{_SIZE}" height="{_SIZE}" fill="none" stroke="#888"/>'
    diagonal = f'<path d="M{_MARGIN} {_MARGIN + _SIZE}L{_MARGIN + _SIZE} {_MARGIN}" stroke="#888" stroke-dasharray="4"/>'
    ticks = "".join(
        f'<text x="{_MARGIN + _SIZE * share:.0f}" y="{full - 24}" text-anchor="middle">{share}</text>'
        f'<text x="{_MARGIN - 6}" y="{_MARGIN + _SIZE * (1 - share) + 4:.0f}" text-anchor="end">{share}</text>'
        for share in (0, 0.5, 1)
    )
    names = (
        f'<text x="{full // 2}" y="{full - 8}" text-anchor="middle">score</text>'
        f'<text x="{_MARGIN}" y="14">share of correct predictions: '
        '<tspan fill="#c50">raw</tspan>, <tspan fill="#06c">calibrated</tspan></text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {full}" width="{full}" height="{full}" '
        f'font-family="sans-serif" font-size="12"><rect width="{full}" height="{full}" fill="#fff"/>{axis}{diagonal}'
        f"{_line(decision.before.bins, '#c50')}{_line(decision.after.bins, '#06c')}{ticks}{names}</svg>\n"
    )


def _line(bins: Sequence[Bin], color: str) -> str:
    points = [(_MARGIN + _SIZE * bin_.score, _MARGIN + _SIZE * (1 - bin_.correct)) for bin_ in bins]
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points)
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="none" stroke="{color}"/>{dots}'

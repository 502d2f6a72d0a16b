"""Reports as one self-contained HTML page: results, plots, settings. It reads the JSON form, also of older files."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bertserve.bench.report import plots


def render_page(documents: Sequence[Mapping[str, Any]]) -> str:
    """Returns the page of one report, or of several together.

    Args:
        documents: Reports in their JSON form.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    runs = sorted((run for document in documents for run in document["runs"]), key=_place)
    figures = "".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>" for title, svg in plots.draw_plots(runs).items()
    )
    return _PAGE.format(
        title=html.escape(", ".join(f"{document['command']} {document['started']}" for document in documents)),
        verdicts="".join(map(_results_list, documents)),
        runs=_runs_table(runs),
        plots=figures,
        warnings=_warnings(runs),
        settings="".join(map(_settings_block, documents)),
    )


def _place(run: Mapping[str, Any]) -> float:
    """Returns where a run stands: closed loops first, in the order in which they ran, then open loops by their rates."""
    return sum(map(plots.offered_rate, run["targets"])) if plots.is_open(run) else -1.0


def _warnings(runs: Sequence[Mapping[str, Any]]) -> str:
    """Returns all warnings behind one line, which opens."""
    lines = [f"{run['name']}: {warning}" for run in runs for warning in run["generator"]["warnings"]]
    warned = sum(bool(run["generator"]["warnings"]) for run in runs)
    said = f"The generator warns of {warned} of {len(runs)} runs, whose figures may be its own"
    return f'<details class="warnings"><summary>{said}</summary>{_list(lines)}</details>' if lines else ""


def _results_list(document: Mapping[str, Any]) -> str:
    lines = [f"{name}: {_format(value)}" for name, value in document["figures"].items()]
    lines += [
        f"{'passed' if verdict['passed'] else 'MISSED'}: {verdict['condition']}, measured {_format(verdict['measured'])}"
        for verdict in document["verdicts"]
    ]
    return _list(lines)


def _runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    head: tuple[str, ...] = (
        "run",
        "target",
        "requests",
        "errors",
        "offered/s",
        "answered/s",
        "texts/s",
        "tokens/s",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "p99.9 ms",
        "max ms",
    )
    head += ("rows a run", "padding", "engine texts/s", "generator CPU")
    rows = []
    for run in runs:
        for target in run["targets"]:
            latency, batches, limit = target["latency"] or {}, target["batches"] or {}, run["limit"] or {}
            cells = [run["name"], target["target"], target["requests"], f"{target['error_rate']:.2%}"]
            cells += [_format(plots.offered_rate(target)), *(_format(target[name]) for name in ("rps", "texts_per_s", "tokens_per_s"))]
            cells += [_format(latency.get(name)) for name in ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")]
            cells += [_format(batches.get("mean_rows")), f"{batches['padding_share']:.1%}" if batches else "–"]
            cells += [_format(limit.get("texts_per_s")), f"{run['generator']['cpu_share']:.0%}"]
            rows.append("".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells))
    table = "<tr>" + "".join(f'<th scope="col">{name}</th>' for name in head) + "</tr>" + "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table>{table}</table></div>'


def _settings_block(document: Mapping[str, Any]) -> str:
    shown = {name: document[name] for name in ("command", "started", "version", "machine", "settings", "engine", "service", "models")}
    shown["errors"] = [target["statuses"] | target["errors"] for run in document["runs"] for target in run["targets"]]
    text = html.escape(json.dumps(shown, indent=1, ensure_ascii=False))
    names = html.escape(", ".join(run["name"] for run in document["runs"]))
    return f"<details><summary>Settings, service and models: {names}</summary><pre>{text}</pre></details>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>bert-bench: {title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 14px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 12px; white-space: nowrap; }}
td, th {{ padding: .2em .6em; border-bottom: 1px solid #8886; text-align: right; }}
td:nth-child(-n+2), th:nth-child(-n+2) {{ text-align: left; }}
.plots {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1em; }}
figure {{ margin: 1em 0 0; }} figcaption {{ font-weight: 600; }} svg {{ width: 100%; height: auto; }}
summary {{ cursor: pointer; }} pre {{ font-size: 11px; overflow: auto; }} .warnings {{ color: light-dark(#a33, #f99); margin: 1em 0; }}
</style></head><body>
<h1>bert-bench</h1><p>{title}</p>
{verdicts}
{warnings}
{runs}
<div class="plots">{plots}</div>
{settings}
</body></html>
"""

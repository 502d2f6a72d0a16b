"""deploy/grafana and deploy/prometheus: their metrics exist, are described, and have values for a service under load."""

import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from support import ROOT, tiny
from support.app_client import call_once, serving, state_of
from support.replica import ServeProcess, running

PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"
DASHBOARD: dict[str, Any] = json.loads((GRAFANA / "bertserve.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
QUERIES = {f"{panel['title']} {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
ALERTS = [rule for rule in RULES if "alert" in rule]
EXPRESSIONS = QUERIES | {rule["alert"]: rule["expr"] for rule in ALERTS} | RECORDED
# labels that Prometheus adds to each series
OF_PROMETHEUS = {"job", "instance"}
WORDS = set("sum by rate increase count max min_over_time changes histogram_quantile vector absent and or on time offset".split())
WORDS |= {"clamp_min", "ln", "group_left"}
VALUES = {"$job": ".+", "$instance": ".+", "$model": ".+", "$__rate_interval": "20s"}


@pytest.fixture(name="series", scope="module")
def series_of_a_service(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Returns the labels of each sample of `/metrics` by name, after one request to a service with one broken model."""
    folder = tmp_path_factory.mktemp("monitored") / "models"
    tiny.calibrate(tiny.bundle(folder))
    (tiny.bundle(folder, "broken") / "tokenizer.json").write_text("{}")

    service = state_of(folder, skip_broken=True)
    call_once(service, "POST", "/classify", json={"inputs": "good", "parameters": {"decide": True, "threshold": 1.0}})
    samples = [sample for family in text_string_to_metric_families(service.metrics.render().decode()) for sample in family.samples]
    return {"up": set()} | {sample.name: set(sample.labels) for sample in samples}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_expression_uses_existing_metrics_and_labels(series: dict[str, set[str]], name: str) -> None:
    expression = EXPRESSIONS[name]
    for rule_name, source in RECORDED.items():
        expression = re.sub(rf"{rule_name}(\{{[^}}]*\}})?", lambda _, source=source: source, expression)  # type: ignore[misc]
    bare = re.sub(r"\[[^]]*\]", "", expression)
    mentions = re.findall(r"\b([a-z_]+)\b(\{[^}]*\})?", re.sub(r'"[^"]*"|\b(?:by|on) \([^)]*\)', "", bare))
    selectors = [(metric, set(re.findall(r"(\w+)[=!]", labels_text))) for metric, labels_text in mentions if metric not in WORDS]
    group_labels = {label for labels in re.findall(r"\bby \(([^)]*)\)", bare) for label in labels.split(", ")}
    assert selectors
    assert [metric for metric, _ in selectors if metric not in series] == []
    assert {label for metric, labels in selectors for label in labels - series[metric] - OF_PROMETHEUS} == set()
    assert group_labels - OF_PROMETHEUS - set.union(*(series[metric] for metric, _ in selectors)) == set()


def test_dashboard_variables_match_the_queries() -> None:
    variables = set(re.findall(r"\$\{?(\w+)", json.dumps([DASHBOARD["panels"], DASHBOARD["templating"]]))) - {"__rate_interval", "__all"}
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == variables


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_has_a_runbook_and_tests(rule: dict[str, Any]) -> None:
    tests = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
    outcomes = [bool(case["exp_alerts"]) for test in tests for case in test["alert_rule_test"] if case["alertname"] == rule["alert"]]
    assert rule["labels"]["severity"] in ("critical", "warning")
    runbook = rule["annotations"]["runbook"]
    [page] = [word for word in runbook.split() if word.endswith(".md")]
    assert runbook.startswith(f"{rule['alert']} ")
    assert f"| {rule['alert']} |" in (ROOT / page).read_text(encoding="utf-8")
    assert outcomes[0] is True
    assert False in outcomes


@pytest.mark.full_grid
@pytest.mark.parametrize(
    "command", [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml"), ("test", "rules", "alerts_test.yml")]
)
def test_promtool_accepts_the_rules_and_the_configuration(command: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    process = subprocess.run([promtool, *command], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")


def is_drift(before: str, after: str, folder: Path) -> bool:
    """Returns whether the alert of drift fires if a scrape gives the second of two pages of metrics from the tenth minute on."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    values: dict[str, list[float]] = {}
    for page in (before, after):
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name in ("bertserve_scores_total", "bertserve_reference_scores"):
                    labels = ", ".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    values.setdefault(f'{sample.name}{{job="bertserve", {labels}}}', []).append(sample.value)
    expression = 'count(ALERTS{alertname="BertserveScoresDrift", alertstate="firing"}) or vector(0)'
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": f"{first}x9 {last}x60"} for name, (first, last) in values.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": "40m", "exp_samples": [{"labels": "{}", "value": 1}]}],
    }
    (folder / "test.yml").write_text(yaml.safe_dump({"rule_files": [str(PROMETHEUS / "alerts.yml")], "tests": [case]}))
    process = subprocess.run([promtool, "test", "rules", str(folder / "test.yml")], capture_output=True, text=True, check=False)
    assert process.returncode == 0 or "got:" in process.stdout + process.stderr, process
    return process.returncode == 0


async def test_other_texts_are_drift(tmp_path: Path) -> None:
    """The alert stays silent for texts like the calibration's, and for a few texts of another kind."""
    rng = random.Random(5)
    usual, same, other = ([" ".join(rng.choices(tiny.WORDS[:12], k=length)) for _ in range(400)] for length in (2, 2, 20))
    path = tiny.calibrate(tiny.bundle(tmp_path / "models"), scale=[2.0])
    async with serving(state_of(path.parent, max_inputs=400)) as client:
        answer = (await client.post("/classify", json={"inputs": usual, "parameters": {"top_k": 1}})).json()
    counts = np.histogram([best["score"] for [best] in answer], bins=20, range=(0, 1))[0]
    tiny.calibrate(path, scale=[2.0], score_counts=counts.tolist())
    async with serving(state_of(path.parent, max_inputs=400)) as client:
        pages = [(await client.get("/metrics")).text]
        for texts in (same, other[:100], other):
            await client.post("/classify", json={"inputs": texts})
            pages.append((await client.get("/metrics")).text)
    assert [is_drift(before, after, tmp_path) for before, after in itertools.pairwise(pages)] == [False, False, True]


@pytest.fixture(name="prometheus")
def prometheus_of_a_loaded_service(models: Path, tmp_path: Path) -> Iterator[httpx.Client]:
    """Yields a client of a real Prometheus with the alerts, which scrapes two workers each second while bert-bench loads them."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    tiny.calibrate(models / "tiny")
    with running(models, tmp_path / "serve.log", "--workers", "2", "--threads", "2") as server:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        static = {"static_configs": [{"targets": [server.url.removeprefix("http://")]}]}
        config["scrape_configs"] = [{"job_name": config["scrape_configs"][0]["job_name"], **static}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
        log = tmp_path / "prometheus.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [
                    program,
                    f"--config.file={tmp_path}/prometheus.yml",
                    f"--storage.tsdb.path={tmp_path}/data",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stderr=output,
            )
        try:
            with _after_a_load(server, log) as client:
                yield client
        finally:
            process.terminate()
            process.wait(20)


def _after_a_load(server: ServeProcess, log: Path) -> httpx.Client:
    bench = [str(Path(sys.executable).with_name("bert-bench")), "closed", "--target", f"{server.url}/classify=short"]
    subprocess.run([*bench, "--connections", "8", "--seconds", "15"], check=True, capture_output=True)
    while (address := re.search(r"Listening on\S*.*address=(127\S+:\d+)", log.read_text())) is None:
        time.sleep(0.1)
    return httpx.Client(base_url=f"http://{address[1]}", timeout=20, trust_env=False)


@pytest.mark.full_grid
@pytest.mark.serial
def test_every_panel_and_alert_has_values_under_load(prometheus: httpx.Client) -> None:
    def query(expression: str) -> list[Any]:
        answer = prometheus.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", answer
        result: list[Any] = answer["data"]["result"]
        return result

    values = {name: [float(series["value"][1]) for series in query(_filled_in(expression))] for name, expression in QUERIES.items()}
    groups = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    evaluations = [rule for group in groups for rule in group["rules"]]
    assert [name for name, samples in values.items() if all(map(math.isnan, samples))] == []
    assert {rule["name"]: rule["health"] for rule in evaluations} == {rule.get("alert", rule.get("record")): "ok" for rule in RULES}
    assert [rule["name"] for rule in evaluations if rule.get("state") == "firing"] == []


def _filled_in(expression: str) -> str:
    """Returns a panel's query as Grafana sends it, with all jobs, instances and models selected."""
    for variable, value in VALUES.items():
        expression = expression.replace(variable, value)
    return expression

"""The Kubernetes and KServe manifests match the service: paths, port, settings, metrics and shutdown time."""

import re
from typing import Any

import pytest

import facts
from bertserve.service.command_line import parse
from bertserve.service.metrics import Metrics
from bertserve.service.server import serve, workers
from bertserve.service.settings import ENV_PREFIX, Settings
from support import ROOT, manifests
from support.manifests import DEPLOY, KUBERNETES, Container, document

DEPLOYMENT = document("base/deployment.yaml")
POD = DEPLOYMENT["spec"]["template"]["spec"]
[SERVICE] = POD["containers"]
AUTOSCALER = document("components/autoscaling/horizontalpodautoscaler.yaml")
SCALED = document("components/keda/scaledobject.yaml")["spec"]
LABELS = {"app.kubernetes.io/name": "bertserve"}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# After its shutdown timeout, the service joins threads and sends finished responses. This takes less time (see test_stopping.py).
MARGIN_S = 10

each_pod = pytest.mark.parametrize(("path", "pod"), list(manifests.pods()), ids=lambda value: value.name if hasattr(value, "name") else "")
each_container = pytest.mark.parametrize(
    "container", manifests.containers(), ids=lambda each: f"{each.path.relative_to(DEPLOY)}:{each.spec['name']}"
)


def services() -> list[Container]:
    """Returns the complete definitions of containers that run the service, without patches."""
    return [container for container in manifests.containers() if "readinessProbe" in container.spec]


@pytest.fixture(name="settings")
def settings_of_the_config_map() -> Settings:
    return parse(Settings, ["--config", str(KUBERNETES / "base/bertserve.toml")])


def stop_s(container: Container, settings: Settings) -> float:
    """Returns the seconds that a container's service can need to stop, without the margin."""
    values = {item["name"]: item["value"] for item in container.spec["env"]}
    drain = float(values.get(f"{ENV_PREFIX}PRE_STOP_DELAY_S", settings.pre_stop_delay_s))
    return drain + float(values.get(f"{ENV_PREFIX}SHUTDOWN_TIMEOUT_S", settings.shutdown_timeout_s))


def test_the_ingress_routes_to_the_service(settings: Settings) -> None:
    ingress, service = document("components/ingress/ingress.yaml"), document("base/service.yaml")
    [rule] = ingress["spec"]["rules"]
    [_, path] = rule["http"]["paths"]
    limits = {name.rpartition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()}

    assert path["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": service["spec"]["ports"][0]["name"]}}
    assert [each["hosts"] for each in ingress["spec"]["tls"]] == [[rule["host"]]]
    assert limits["proxy-body-size"] == f"{settings.max_body_bytes >> 20}m"
    assert int(limits["proxy-read-timeout"]) > settings.max_timeout_ms / 1000
    [patch] = document("components/ingress/kustomization.yaml")["patches"]
    assert "/spec/ingress/0/from/-" in patch["patch"]
    assert isinstance(document("base/networkpolicy.yaml")["spec"]["ingress"][0]["from"], list)


def test_the_ingress_hides_metrics() -> None:
    [hidden, path] = document("components/ingress/ingress.yaml")["spec"]["rules"][0]["http"]["paths"]
    service = document("components/ingress/service.yaml")
    assert hidden["path"] == "/metrics"
    assert hidden["pathType"] == "Exact"
    assert path["path"] == "/"
    assert path["pathType"] == "Prefix"
    assert hidden["backend"]["service"] == {"name": service["metadata"]["name"], "port": {"name": service["spec"]["ports"][0]["name"]}}
    assert "selector" not in service["spec"]
    assert service["metadata"]["name"] != path["backend"]["service"]["name"]


def test_the_kserve_predictor_requires_an_api_key() -> None:
    [(_, pod)] = [(path, pod) for path, pod in manifests.pods() if path == manifests.KSERVE]
    [container] = pod["containers"]
    variables = {item["name"]: item["value"] for item in container["env"]}
    [mount] = container["volumeMounts"]
    assert variables[f"{ENV_PREFIX}API_KEY_FILE"] == f"{mount['mountPath']}/keys.txt"
    assert [volume for volume in POD["volumes"] if volume["name"] == mount["name"]] == pod["volumes"]
    assert POD["securityContext"]["fsGroup"] == pod["securityContext"]["fsGroup"]


def test_probes_use_existing_paths() -> None:
    paths = {path for path, methods in facts.openapi()["paths"].items() if "get" in methods}
    assert {item.path for item in services()} == {path for path in manifests.files() if "readinessProbe:" in path.read_text("utf-8")}
    for container in services():
        [port] = container.spec["ports"]
        probes = [container.spec[name]["httpGet"] for name in PROBES]
        assert {probe["path"] in paths for probe in probes} == {True}
        assert {probe["port"] in (port["name"], port["containerPort"]) for probe in probes} == {True}


def test_all_manifests_use_the_port_of_the_image() -> None:
    [port] = re.findall(rf"{ENV_PREFIX}PORT=(\d+)", DOCKERFILE)
    assert re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE) == [port]
    assert {each["containerPort"] for container in services() for each in container.spec["ports"]} == {int(port)}
    [http] = SERVICE["ports"]
    assert [each["targetPort"] for each in document("base/service.yaml")["spec"]["ports"]] == [http["name"]]
    [rule] = document("base/networkpolicy.yaml")["spec"]["ingress"]
    assert rule["ports"] == [{"port": http["name"]}]
    [endpoint] = document("components/monitoring/podmonitor.yaml")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == http["name"]
    assert endpoint["path"] in facts.openapi()["paths"]


def test_environment_variables_are_known_settings() -> None:
    """An unknown BERT_SERVE_* variable would stop the start of the service."""
    names = [item["name"] for container in manifests.containers() for item in container.spec.get("env", [])]
    text = "".join(path.read_text(encoding="utf-8") for path in manifests.files())
    assert set(names) == set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", text))
    assert set(names) <= {ENV_PREFIX + name.upper() for name in Settings.model_fields}


def test_the_paths_of_the_config_file_and_the_keys_are_mounted(settings: Settings) -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in SERVICE["volumeMounts"]}
    [config] = document("base/kustomization.yaml")["configMapGenerator"]
    [variable] = SERVICE["env"]
    assert variable["value"] == f"{mounts['config']}/{config['files'][0]}"
    assert str(settings.api_key_file) == f"{mounts['keys']}/keys.txt"
    assert "--from-file=keys.txt" in (KUBERNETES / "base/deployment.yaml").read_text(encoding="utf-8")


def test_the_grace_period_covers_the_shutdown_of_the_service(settings: Settings) -> None:
    assert workers.MARGIN_S < MARGIN_S
    assert serve.LAST_RESPONSES_S < workers.MARGIN_S
    for container in services():
        assert container.pod["terminationGracePeriodSeconds"] == stop_s(container, settings) + MARGIN_S


def test_a_stopping_pod_is_not_restarted_and_gets_no_requests(settings: Settings) -> None:
    """The readiness probe fails within the pre-stop delay. The liveness probe waits longer than a shutdown."""
    for container in services():
        ready, live = container.spec["readinessProbe"], container.spec["livenessProbe"]
        assert ready["periodSeconds"] * ready["failureThreshold"] <= settings.pre_stop_delay_s
        assert live["periodSeconds"] * live["failureThreshold"] > container.pod["terminationGracePeriodSeconds"]


def test_selectors_find_the_pods() -> None:
    """Each selector has the labels of the pods. An empty selector would match every pod of the namespace."""
    assert DEPLOYMENT["spec"]["template"]["metadata"]["labels"] == LABELS
    selectors: list[Any] = [
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        *(spread["labelSelector"]["matchLabels"] for spread in POD["topologySpreadConstraints"]),
        document("base/service.yaml")["spec"]["selector"],
        document("base/poddisruptionbudget.yaml")["spec"]["selector"]["matchLabels"],
        document("base/networkpolicy.yaml")["spec"]["podSelector"]["matchLabels"],
        document("components/monitoring/podmonitor.yaml")["spec"]["selector"]["matchLabels"],
    ]
    assert [selector for selector in selectors if selector != LABELS] == []


def test_the_autoscaler_uses_an_existing_metric() -> None:
    [rule] = document("prometheus-adapter.yaml")["rules"]["custom"]
    name = next(metric["pods"]["metric"]["name"] for metric in AUTOSCALER["spec"]["metrics"] if metric["type"] == "Pods")
    page = Metrics().render().decode()
    guide = (ROOT / "docs/how-to/kubernetes.md").read_text(encoding="utf-8")
    text = (KUBERNETES / "components/autoscaling/horizontalpodautoscaler.yaml").read_text(encoding="utf-8") + guide + rule["seriesQuery"]

    assert rule["name"]["as"] == name
    names = set(re.findall(r"\bbertserve_\w+", text)) - {name}
    assert {"bertserve_queue_tokens", "bertserve_tokens_total", "bertserve_inference_seconds_sum"} <= names
    assert [name for name in names if not re.search(rf"^# TYPE {re.sub('_sum$', '', name)} ", page, re.MULTILINE)] == []


def test_keda_queries_the_metric_that_the_podmonitor_collects() -> None:
    monitor = document("components/monitoring/podmonitor.yaml")["spec"]
    queue, _ = SCALED["triggers"]
    [(metric, namespace, job)] = re.findall(r'(\w+)\{namespace="([^"]+)",job="([^"]+)"\}\[1m\]', queue["metadata"]["query"])

    assert re.search(rf"^# TYPE {metric} gauge$", Metrics().render().decode(), re.MULTILINE)
    assert metric in document("prometheus-adapter.yaml")["rules"]["custom"][0]["seriesQuery"]
    assert namespace == document("kustomization.yaml")["namespace"]
    assert job == LABELS[monitor["jobLabel"]]
    [endpoint] = monitor["podMetricsEndpoints"]
    assert endpoint["interval"] == f"{SCALED['pollingInterval']}s"


@each_pod
def test_pods_follow_the_restricted_security_standard(path: Any, pod: Any) -> None:
    """Pods run as the image's user, without an API token, and with the seccomp profile of the runtime."""
    if "components" in path.parts:
        assert "securityContext" not in pod  # the base has it
        return
    [user] = re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)
    context = pod["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"]) == (True, int(user), int(user))
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)


@each_container
def test_containers_have_no_privileges(container: Container) -> None:
    if container.path.parent.name == "gpu" or (container.path.parent.name == "models-volume" and container.spec["name"] == "bertserve"):
        assert "securityContext" not in container.spec  # the base has it
        return
    context = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    assert container.spec["securityContext"] == context
    assert "memory" in container.spec["resources"]["limits"]

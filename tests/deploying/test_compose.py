"""deploy/compose and deploy/systemd match the service: ports, mounts, settings and shutdown time."""

from __future__ import annotations

import shlex

import manifests
from bertserve.service.settings import PREFIX, Settings
from manifests import COMPOSE, DEPLOY

[READ] = manifests.documents(COMPOSE)
SERVICES = READ["services"]
DEFAULT_STOP_S = sum(Settings.model_fields[name].default for name in ("pre_stop_delay_s", "shutdown_timeout_s")) + 10
CONFIGURED = ("prometheus/prometheus.yml", "prometheus/alerts.yml", "grafana/provisioning", "grafana/bertserve.json")


def mounted() -> dict[str, str]:
    """Returns the paths that are mounted from `deploy/`, each with its path in the container."""
    found = [volume.split(":") for service in SERVICES.values() for volume in service.get("volumes", []) if volume.startswith("..")]
    return {source.removeprefix("../"): place for source, place, *_ in found}


def test_ports_are_published_only_on_loopback() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert ["127.0.0.1:8000:8000", "127.0.0.1:9090:9090", "127.0.0.1:3000:3000"] == ports


def test_compose_and_systemd_wait_for_the_shutdown() -> None:
    """Their stop timeouts fit the default shutdown settings of the service."""
    assert "environment" not in SERVICES["bertserve"]
    assert DEFAULT_STOP_S == manifests.seconds(SERVICES["bertserve"]["stop_grace_period"])
    assert [str(int(DEFAULT_STOP_S))] == manifests.unit()["TimeoutStopSec"]


def test_compose_containers_have_no_privileges() -> None:
    """Containers have no capabilities and cannot gain any. The service can write only to /dev/shm."""
    assert [["ALL"]] * 3 == [service["cap_drop"] for service in SERVICES.values()]
    assert [["no-new-privileges:true"]] * 3 == [service["security_opt"] for service in SERVICES.values()]
    assert (True, ["/dev/shm"]) == (SERVICES["bertserve"]["read_only"], SERVICES["bertserve"]["tmpfs"])


def test_prometheus_and_grafana_get_their_configuration() -> None:
    assert set(CONFIGURED) == set(mounted())
    lines = [volume for service in SERVICES.values() for volume in service.get("volumes", []) if volume.startswith("..")]
    assert {True} == {line.endswith(":ro") for line in lines}


def test_prometheus_and_grafana_find_each_other() -> None:
    assert [] == [name for name in CONFIGURED if not (DEPLOY / name).exists()]
    [scraping] = manifests.documents(DEPLOY / "prometheus/prometheus.yml")
    targets = [target for job in scraping["scrape_configs"] for each in job["static_configs"] for target in each["targets"]]
    assert ["bertserve:8000"] == targets
    [source] = next(iter(manifests.documents(DEPLOY / "grafana/provisioning/datasources/bertserve.yml")))["datasources"]
    assert "http://prometheus:9090" == source["url"]
    [provider] = next(iter(manifests.documents(DEPLOY / "grafana/provisioning/dashboards/bertserve.yml")))["providers"]
    assert f"{provider['options']['path']}/bertserve.json" == mounted()["grafana/bertserve.json"]


def test_the_unit_runs_bert_serve_with_known_settings() -> None:
    program, command, *flags = shlex.split(manifests.unit()["ExecStart"][0])
    assert ("bert-serve", "serve") == (program.rpartition("/")[2], command)
    assert {flag for flag in flags if flag.startswith("--")} <= {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    variables = [word.partition("=")[0] for line in manifests.unit()["Environment"] for word in shlex.split(line)]
    ours = {name for name in variables if name.startswith(PREFIX)}
    assert {f"{PREFIX}CACHE_DIR"} == ours <= {PREFIX + name.upper() for name in Settings.model_fields}


def test_the_unit_signals_the_main_process() -> None:
    """The main process signals its workers. Exit code 2 (invalid setting) causes no restart, and SIGHUP reloads the keys."""
    unit = manifests.unit()
    assert (["mixed"], ["2"], ["on-failure"]) == (unit["KillMode"], unit["RestartPreventExitStatus"], unit["Restart"])
    assert ["/bin/kill -HUP $MAINPID"] == unit["ExecReload"]

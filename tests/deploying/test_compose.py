"""deploy/compose and deploy/systemd match the service: ports, mounts, settings and shutdown time."""

import shlex

from bertserve.service.command_line import parse
from bertserve.service.settings import ENV_PREFIX, Settings
from support import manifests
from support.manifests import COMPOSE, DEPLOY

[READ] = manifests.documents(COMPOSE)
SERVICES = READ["services"]
MARGIN_S = 10  # time to send the last answers
CONFIGURED = ("haproxy/haproxy.cfg", "prometheus/prometheus.yml", "prometheus/alerts.yml", "grafana/provisioning", "grafana/bertserve.json")


def flags(variables: dict[str, str | int]) -> list[str]:
    """Returns the flags with the values of BERT_SERVE_* variables."""
    return [
        word for name, value in variables.items() for word in (f"--{name.removeprefix(ENV_PREFIX).lower().replace('_', '-')}", str(value))
    ]


def stop_s(arguments: list[str]) -> float:
    """Returns how long a service with these flags can need to stop, in seconds."""
    settings = parse(Settings, arguments)
    return settings.pre_stop_delay_s + settings.shutdown_timeout_s + MARGIN_S


def mounts_of_deploy() -> dict[str, str]:
    """Returns the paths that are mounted from `deploy/`, each with its path in the container."""
    mounts = [volume.split(":") for service in SERVICES.values() for volume in service.get("volumes", []) if volume.startswith("..")]
    return {source.removeprefix("../"): place for source, place, *_ in mounts}


def test_ports_are_published_only_on_loopback() -> None:
    """Replicas publish none, so that there can be several."""
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports == ["127.0.0.1:8000:8000", "127.0.0.1:9090:9090", "127.0.0.1:3000:3000"]
    assert "ports" not in SERVICES["bertserve"]


def test_compose_and_systemd_wait_for_the_shutdown() -> None:
    assert manifests.seconds(SERVICES["bertserve"]["stop_grace_period"]) == stop_s(flags(SERVICES["bertserve"]["environment"]))
    _, _, *words = unit_command()
    words = words[words.index("--port") :]  # the file of --config exists only on the machine
    assert manifests.unit()["TimeoutStopSec"] == [str(int(stop_s(words)))]


def unit_command() -> list[str]:
    [command] = manifests.unit()["ExecStart"]
    return shlex.split(command.replace("%i", "8001"))


def test_compose_containers_have_no_privileges() -> None:
    assert [service["cap_drop"] for service in SERVICES.values()] == [["ALL"]] * 4
    assert [service["security_opt"] for service in SERVICES.values()] == [["no-new-privileges:true"]] * 4
    assert (SERVICES["bertserve"]["read_only"], SERVICES["bertserve"]["tmpfs"]) == (True, ["/dev/shm"])


def test_other_services_get_their_configuration() -> None:
    assert set(mounts_of_deploy()) == set(CONFIGURED)
    lines = [volume for service in SERVICES.values() for volume in service.get("volumes", []) if volume.startswith("..")]
    assert {line.endswith(":ro") for line in lines} == {True}


def test_prometheus_and_grafana_find_each_other() -> None:
    assert [name for name in CONFIGURED if not (DEPLOY / name).exists()] == []
    [prometheus] = manifests.documents(DEPLOY / "prometheus/prometheus.yml")
    [discovery] = [item for job in prometheus["scrape_configs"] for item in job["dns_sd_configs"]]
    assert SERVICES["haproxy"]["environment"]["REPLICAS"] == f"{discovery['names'][0]}:{discovery['port']}"
    assert discovery["names"][0] in SERVICES
    [source] = next(iter(manifests.documents(DEPLOY / "grafana/provisioning/datasources/bertserve.yml")))["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert prometheus["rule_files"] == ["alerts.yml"]
    [provider] = next(iter(manifests.documents(DEPLOY / "grafana/provisioning/dashboards/bertserve.yml")))["providers"]
    assert provider["type"] == "file"
    assert mounts_of_deploy()["grafana/bertserve.json"] == f"{provider['options']['path']}/bertserve.json"


def test_the_unit_runs_bert_serve_with_known_settings() -> None:
    program, command, *words = unit_command()
    assert (program.rpartition("/")[2], command) == ("bert-serve", "serve")
    assert {word for word in words if word.startswith("--")} <= {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    variables = [word.partition("=")[0] for line in manifests.unit()["Environment"] for word in shlex.split(line)]
    ours = {name for name in variables if name.startswith(ENV_PREFIX)}
    assert {f"{ENV_PREFIX}CACHE_DIR"} == ours <= {ENV_PREFIX + name.upper() for name in Settings.model_fields}

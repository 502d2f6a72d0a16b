"""deploy/ray: the files match Ray's schema, each other, and the settings of the service."""

import warnings
from importlib import import_module
from typing import Any

import yaml

from bertserve.service.settings import Settings
from support import variables
from support.manifests import DEPLOY

SERVE: dict[str, Any] = yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text(encoding="utf-8"))
SERVICE: dict[str, Any] = yaml.safe_load((DEPLOY / "ray/rayservice.yaml").read_text(encoding="utf-8"))
ON_KUBERNETES: dict[str, Any] = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])


def ray(module: str) -> Any:
    """Returns an imported module, without the warnings that Ray emits at import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(module)


def test_ray_accepts_both_configurations() -> None:
    """Ray's schema refuses unknown keys. The application and the policy in the files exist."""
    schema = ray("ray.serve.schema").ServeDeploySchema
    replica = ray("bertserve.service.ray_serve")
    for path in ("ray/serve.yaml", "ray/rayservice.yaml"):
        text = (DEPLOY / path).read_text(encoding="utf-8")
        config = yaml.safe_load(text)
        (application,) = schema.model_validate(
            config if "applications" in config else yaml.safe_load(config["spec"]["serveConfigV2"])
        ).applications
        (deployment,) = application.deployments
        policy = deployment.autoscaling_config["policy"]["policy_function"]
        assert (application.import_path, policy) == ("bertserve.service.ray_serve:app", "bertserve.service.ray_serve:autoscaling_policy")
        assert callable(replica.app)
        assert callable(replica.autoscaling_policy)
        assert deployment.name == replica.Replica.name


def test_arguments_are_settings_of_a_replica() -> None:
    read_settings = ray("bertserve.service.ray_serve").read_settings
    for config in (SERVE, ON_KUBERNETES):
        (application,) = config["applications"]
        arguments = {name: value for name, value in application["args"].items() if name != "api_key_file"}
        assert arguments.keys() <= read_settings(arguments).model_fields_set
        assert application["args"].keys() <= Settings.model_fields.keys()
        assert application["deployments"][0]["graceful_shutdown_timeout_s"] * 1000 > Settings.model_fields["max_timeout_ms"].default


def test_kubernetes_has_the_same_configuration() -> None:
    here, there = yaml.safe_load(yaml.safe_dump(SERVE)), yaml.safe_load(yaml.safe_dump(ON_KUBERNETES))
    for config in (here, there):
        config["http_options"].pop("host")
        config["applications"][0].pop("args")
        config["applications"][0]["deployments"][0].pop("ray_actor_options")
    assert there == here


def test_kubernetes_has_the_same_environment() -> None:
    groups = [SERVICE["spec"]["rayClusterConfig"]["headGroupSpec"], *SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]]
    (application,) = ON_KUBERNETES["applications"]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {variable["name"]: variable["value"] for variable in container["env"]} == variables(DEPLOY / "ray/ray.env")
        assert pod["terminationGracePeriodSeconds"] > application["deployments"][0]["graceful_shutdown_timeout_s"]
        assert application["args"]["api_key_file"].startswith(container["volumeMounts"][0]["mountPath"])
    workers = groups[1]
    assert int(workers["rayStartParams"]["num-cpus"]) == application["deployments"][0]["ray_actor_options"]["num_cpus"]
    assert ray("ray").__version__ == SERVICE["spec"]["rayClusterConfig"]["rayVersion"]

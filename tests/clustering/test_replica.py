"""The settings of a Ray Serve replica and the autoscaling policy, without a running Ray."""

from __future__ import annotations

import os
import re
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from bertserve.service.errors import SettingsError
from conftest import ROOT


@pytest.fixture(name="replica", scope="module")
def module() -> ModuleType:
    """Returns `bertserve.service.ray_serve`. Only this fixture imports it, because Ray takes half a second and emits warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("bertserve.service.ray_serve")


@pytest.mark.parametrize("name", ["port", "workers", "tls_cert", "shutdown_timeout_s", "admin_key_file", "forwarded_allow_ips"])
def test_a_setting_that_ray_controls_is_refused(replica: ModuleType, name: str) -> None:
    value: Any = {"port": 1, "workers": 1, "shutdown_timeout_s": 1.0, "forwarded_allow_ips": ["127.0.0.1"]}.get(name, "a")
    with pytest.raises(ValidationError) as caught:
        replica.ReplicaSettings.model_validate({name: value, "models": "."})
    if name not in ("tls_cert", "config"):  # their errors say what is missing
        assert f"`{name}` has no effect" in str(caught.value) and replica.LEFT_TO_RAY[name] in str(caught.value)


def test_every_setting_left_to_ray_exists(replica: ModuleType) -> None:
    """An unknown name in the list would have no effect."""
    assert set(replica.LEFT_TO_RAY) <= set(replica.ReplicaSettings.model_fields)


def test_other_settings_are_read_as_by_the_command(replica: ModuleType) -> None:
    settings = replica.ReplicaSettings.model_validate({"models": ".", "max_inputs": 7})
    assert (7, 8192) == (settings.max_inputs, settings.max_batch_tokens)
    with pytest.raises(ValidationError, match="modle"):
        replica.ReplicaSettings.model_validate({"modle": "a"})


def test_environment_variables_are_read_as_by_the_command(replica: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_SERVE_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("BERT_SERVE_MAX_INPUTS", "7")
    assert 7 == replica.ReplicaSettings.model_validate({"models": "."}).max_inputs
    monkeypatch.setenv("BERT_SERVE_MAX_INPUT", "7")
    with pytest.raises(SettingsError, match="did you mean BERT_SERVE_MAX_INPUTS"):
        replica.ReplicaSettings.model_validate({"models": "."})


def test_the_variables_of_the_image_are_ignored(replica: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables from the Dockerfile do not fail a deployment. The argument `host` does, and so does BERT_SERVE_WORKERS."""
    for line in re.findall(r"^ENV (.+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE):
        for name, value in (variable.split("=", 1) for variable in line.split()):
            monkeypatch.setenv(name, value)
    assert "0.0.0.0" == os.environ["BERT_SERVE_HOST"]
    settings = replica.ReplicaSettings.model_validate({"models": "."})
    assert (set(), Path("/cache")) == (settings.model_fields_set & set(replica.LEFT_TO_RAY), settings.cache_dir)
    with pytest.raises(ValidationError, match="`host` has no effect"):
        replica.ReplicaSettings.model_validate({"models": ".", "host": "0.0.0.0"})
    monkeypatch.setenv("BERT_SERVE_WORKERS", "2")
    with pytest.raises(ValidationError, match="`workers` has no effect"):
        replica.ReplicaSettings.model_validate({"models": "."})


def test_a_replica_uses_each_setting_that_it_accepts(replica: ModuleType, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting without an effect belongs in `LEFT_TO_RAY`. A deleted replica closes its tracer."""
    context = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0})
    monkeypatch.setattr(replica.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(replica, "configure_logging", lambda _: None)
    used: set[str] = set()

    class Watched(replica.ReplicaSettings):  # type: ignore[misc, name-defined]
        def __getattribute__(self, name: str) -> Any:
            used.add(name)
            return super().__getattribute__(name)

    settings = Watched.model_validate({"models": models, "otlp_endpoint": "http://127.0.0.1:9"})
    used.clear()
    made = replica.Replica.func_or_class.__mro__[1](settings)  # our class, which Ray's class inherits from
    made.__serve_build_asgi_app__()
    # `config` is read with the settings, and `cache_dir` is only for the models in `model`
    assert {"config", "cache_dir"} == set(replica.ReplicaSettings.model_fields) - used - set(replica.LEFT_TO_RAY)
    closed: list[str] = []
    monkeypatch.setattr(type(made._state.tracer), "close", lambda _: closed.append("closed"))
    made.__del__()
    assert ["closed"] == closed


@pytest.mark.parametrize(
    ("queue_s", "busy", "enough"),
    [
        ([], [], 1),
        ([0, 0, 0], [0, 0, 0], 1),
        ([0, 0], [0.5, 0.5], 2),  # a total of 1.0 is more than the limit of 0.8 per replica
        ([0, 0, 0], [0.2, 0.3, 0.2], 1),
        ([0.4, 0.4], [1, 1], 3),  # a short queue, but no reserve
        ([2, 3], [1, 1], 5),  # 5 s of queued work, 1 s per replica
    ],
)
def test_enough_replicas_have_short_queues_and_a_reserve(replica: ModuleType, queue_s: list[float], busy: list[float], enough: int) -> None:
    metrics = {"queue_s": dict(enumerate(queue_s)), "busy": dict(enumerate(busy))} if queue_s else None
    assert (enough, {}) == replica.enough_replicas(SimpleNamespace(aggregated_metrics=metrics))

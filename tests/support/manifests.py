"""Reads the files in `deploy/`: YAML documents, pods, containers, durations and the systemd unit. The tests check the rules."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from support import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
KSERVE = DEPLOY / "kserve/inferenceservice.yaml"
COMPOSE = DEPLOY / "compose/compose.yaml"
UNIT = DEPLOY / "systemd/bertserve@.service"

Document = dict[str, Any]


class Container(NamedTuple):
    path: Path
    pod: Document
    spec: Document


def documents(path: Path) -> list[Document]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def document(name: str) -> Document:
    [content] = documents(KUBERNETES / name)
    return content


def files() -> list[Path]:
    return [*sorted(KUBERNETES.rglob("*.yaml")), KSERVE]


def pods() -> Iterator[tuple[Path, Document]]:
    """Yields the file and the definition of each pod, which is partial in a patch."""
    for path in files():
        for content in documents(path):
            if content.get("kind") == "Deployment":
                yield path, content["spec"]["template"]["spec"]
            elif content.get("kind") == "InferenceService":
                yield path, content["spec"]["predictor"]


def containers() -> list[Container]:
    return [Container(path, pod, spec) for path, pod in pods() for spec in [*pod.get("initContainers", []), *pod["containers"]]]


def seconds(duration: str) -> int:
    assert duration.endswith("s"), duration
    return int(duration[:-1])


def unit() -> dict[str, list[str]]:
    """Returns the settings of the systemd unit; a repeated setting has several values."""
    settings: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            settings.setdefault(name, []).append(value)
    return settings

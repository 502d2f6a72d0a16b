"""The application of deploy/ray on a Ray cluster of this machine, and a load on it."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from ray_cluster import RayCluster, until

ROOT = Path(__file__).parents[2]
BODY = {"inputs": "good film"}


class Cluster(RayCluster):
    """A Ray cluster that serves a folder of models."""

    def __init__(self, models: Path) -> None:
        super().__init__()
        self.models = models

    def deploy(
        self,
        *,
        wait: bool = True,
        route_prefix: str = "/",
        args: dict[str, Any] | None = None,
        scaling: dict[str, Any] | None = None,
        **deployment: Any,
    ) -> None:
        """Deploys or updates the application of deploy/ray/serve.yaml, with fixed replicas or, with `scaling`, changed autoscaling."""
        config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text(encoding="utf-8"))
        config["http_options"] |= {"port": self.http}
        (application,) = config["applications"]
        application |= {
            "import_path": application["import_path"].removeprefix("bertserve."),
            "route_prefix": route_prefix,
            "args": {"models": str(self.models)} | (args or {}),
        }
        (deployed,) = application["deployments"]
        if scaling is None:
            del deployed["autoscaling_config"]
            deployed["num_replicas"] = 2
        else:
            scaled = deployed["autoscaling_config"]
            scaled |= scaling
            scaled["policy"]["policy_function"] = scaled["policy"]["policy_function"].removeprefix("bertserve.")
        deployed |= {"graceful_shutdown_wait_loop_s": 0.2} | deployment  # instead of 2 s, which each stopping replica waits at least
        self.put(config)
        if wait:
            self.wait(route_prefix)

    def replicas(self) -> int:
        states = [replica["state"] for replica in self.status()["deployments"]["bertserve"]["replicas"]]
        return states.count("RUNNING")

    def worker_pids(self) -> list[int]:
        """Returns the process ids of the replicas that answer forty requests."""
        found: list[int] = []
        for _ in range(40):
            with httpx.Client(trust_env=False) as client:
                pid = client.get(f"{self.url}/info").json()["worker"]["pid"]
            if pid not in found:
                found.append(pid)
        return found


@dataclass
class Load:
    """Callers that each send a request, wait for the response, pause, and repeat.

    Attributes:
        url: URL of the service.
        body: Body of each request.
        callers: Number of callers.
        pause_s: Seconds between a response and the next request.
        statuses: Number of responses by status.
        broken: Error names of the requests without a response.
    """

    url: str
    body: Any = field(default_factory=lambda: BODY)
    callers: int = 8
    pause_s: float = 0.02
    statuses: dict[int, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    _stop: bool = False

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(self.callers)
        self._futures = [self._pool.submit(self._call) for _ in range(self.callers)]
        until(lambda: self.statuses.get(200, 0) > self.callers, "the load runs")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        for future in self._futures:
            future.result()
        self._pool.shutdown()

    @property
    def failed(self) -> int:
        """The number of requests without a response, or with a status other than 200."""
        return len(self.broken) + sum(count for status, count in self.statuses.items() if status != 200)

    def _call(self) -> None:
        data = json.dumps(self.body).encode()
        with httpx.Client(timeout=30, trust_env=False) as client:
            while not self._stop:
                try:
                    status = client.post(f"{self.url}/classify", content=data).status_code
                except httpx.TransportError as error:
                    self.broken.append(type(error).__name__)
                    continue
                self.statuses[status] = self.statuses.get(status, 0) + 1
                time.sleep(self.pause_s)

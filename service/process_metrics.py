"""ProcessMetrics: what the system says of each worker, and how many were replaced; looked up when somebody asks. Knows process ids, nothing of what they do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector


class ProcessMetrics(Collector):
    """The metrics `process_*` of every worker, by its index: whichever worker is asked, it answers for all.

    Added up they would be wrong: the CPU seconds of a worker that is replaced fall to none, and only by worker is that a restart.
    """

    def __init__(
        self, process_ids: Sequence[int] = (), replaced: Callable[[], Mapping[str, int]] = lambda: {"ended": 0, "hung": 0}
    ) -> None:
        """Creates it.

        Args:
            process_ids: Of the workers, by index, 0 for one that there is not now; none stands for this process alone.
            replaced: Returns how many workers were replaced, by why.
        """
        self._process_ids = process_ids or (os.getpid(),)
        self._replaced = replaced

    def collect(self) -> Iterable[Metric]:
        """Returns all families as they are now."""
        families: dict[str, Metric] = {}
        for index, process_id in enumerate(self._process_ids):
            if not process_id:
                continue
            for found in ProcessCollector(pid=partial(int, process_id), registry=None).collect():
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                for sample in found.samples:
                    family.add_sample(sample.name, {"worker": str(index)}, sample.value)
        replaced = CounterMetricFamily(
            "bertserve_workers_replaced_total",
            "Workers replaced: they ended by themselves, or hung and were killed.",
            labels=["reason"],
        )
        for reason, count in self._replaced().items():
            replaced.add_metric([reason], count)
        return [*families.values(), replaced]

"""Order: what is to be scored, and how; and the model that is loaded for it, in this process or in an actor of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bertserve.service.scoring.columns import Columns, read_parameters, task_for
from bertserve.service.scoring.scorer import Scorer
from bertserve.service.serving.build import build
from bertserve.service.settings import Settings


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be scored, and how.

    Attributes:
        source: The input, or `-`; with Ray a folder of Parquet files, or its URI.
        output: The output, or `-`; with Ray a folder, or its URI.
        task: Which of the model's tasks; None for its own, or the one that parameters or columns show.
        columns: Field of the task -> column.
        parameters: JSON object, as the endpoint takes it.
        names: Of the columns for predictions and warnings.
        max_rejected: How many rows there may be without an answer.
        restart: Whether to begin again, and to replace what an earlier run made.
        input_format: Of the input; None goes by its name.
        output_format: Of the output; None goes by its name, and else by the input's.
        rejected: The file of rows without an answer; None is one beside the output.
        ray: Address of the cluster; `local` for one on this machine alone, `auto` for the one that this machine belongs to.
        actors: How many; None for as many as there is room for.
        actor_cpus: CPUs of each, and so its lanes; None for those of the smallest node, at most 4.
    """

    source: str
    output: str
    task: str | None
    columns: Mapping[str, str]
    parameters: str
    names: tuple[str, str]
    max_rejected: int
    restart: bool
    input_format: str | None = None
    output_format: str | None = None
    rejected: Path | None = None
    ray: str | None = None
    actors: int | None = None
    actor_cpus: int | None = None


class LoadedModel:
    """The model of an order, and what answers rows by it.

    Attributes:
        state: The service without its HTTP.
        model: The model.
        parameters: Of each request.
        columns: Makes requests of rows.
        scorer: Answers rows.
    """

    def __init__(self, settings: Settings, order: Order) -> None:
        """Loads the model.

        Raises:
            StartError: The model cannot be loaded, or does not answer what the order asks for.
        """
        self.state = build(settings)
        (self.model,) = self.state.registry.models.values()
        self.parameters = read_parameters(order.parameters)
        task = task_for(self.model.tasks, order.task, self.parameters, order.columns)
        self.columns = Columns(task, order.columns, self.parameters, self.state.limits)
        lanes, most = self.state.worker["lanes"], settings.max_batch_tokens
        self.scorer = Scorer(self.model, self.columns, lanes=lanes, max_batch_tokens=most, taken=order.names)

"""The list of all tasks that a bundle can have. A new task needs its import and its entry here."""

from __future__ import annotations

from bertserve.export.tasks import (
    feature_extraction,
    fill_mask,
    multiple_choice,
    question_answering,
    text_classification,
    token_classification,
)
from bertserve.export.tasks.spec import ExportTask

# an architecture belongs to the first task with a matching suffix, so "Model" is last
TASKS: dict[str, ExportTask] = {
    task.name: task
    for task in (
        text_classification.TASK,
        token_classification.TASK,
        question_answering.TASK,
        fill_mask.TASK,
        multiple_choice.TASK,
        feature_extraction.TASK,
    )
}

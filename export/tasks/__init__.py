"""The tasks that a bundle can have: a module for each, whose `EXPORT_TASK` contains all the exporter's facts about it.

They do not import torch, because `bert-export verify` runs without it.
"""

from bertserve.export.tasks import (
    feature_extraction,
    fill_mask,
    multiple_choice,
    question_answering,
    text_classification,
    token_classification,
)
from bertserve.export.tasks.export_task import ExportTask

# an architecture belongs to the first task with a matching suffix, so "Model" is last
_MODULES = (text_classification, token_classification, question_answering, fill_mask, multiple_choice, feature_extraction)
EXPORT_TASKS: dict[str, ExportTask] = {module.EXPORT_TASK.name: module.EXPORT_TASK for module in _MODULES}

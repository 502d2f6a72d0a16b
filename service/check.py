"""The command `bert-serve check`: compares each model's answer to its stored example with the answer at its export."""

from bertserve.service.body.json_text import to_plain
from bertserve.service.body.reading import validate_as
from bertserve.service.body.task_body import TRUSTED_LIMITS
from bertserve.service.build import build
from bertserve.service.bundle.example import difference, example_tolerance
from bertserve.service.errors import BertServeError
from bertserve.service.settings import Settings
from bertserve.service.tasks.catalog import TASKS


async def check(settings: Settings) -> int:
    """Runs the stored example of each model; returns 1 if one answers differently.

    Raises:
        StartError: The service would not start with these settings.
    """
    state = build(settings)
    state.start()
    try:
        failed = 0
        for model in state.registry.models.values():
            example, graphs = model.bundle.manifest.example, model.bundle.manifest.graphs
            try:
                request = example.request
                if model.graph.calibration is not None:  # the result is of the export, without a calibration
                    request = request | {"parameters": {**(request.get("parameters") or {}), "calibrated": False}}
                body = validate_as(TASKS[model.task].body, request, TRUSTED_LIMITS)
                prediction = await model.predict(body.task_inputs(model.bundle.manifest), timeout_s=60)
                reason = difference(example.result, to_plain(body.to_response(prediction.results)), example_tolerance(model.graph, graphs))
            except BertServeError as error:
                reason = error.message
            failed += reason is not None
            print(f"{model.name}: {model.task}, {model.graph.name}: {'ok' if reason is None else f'FAILED: {reason}'}")
        for name, reason in state.registry.broken.items():
            print(f"{name}: not loaded, skipped by --skip-broken: {reason}")
        return 1 if failed else 0
    finally:
        await state.stop(0)

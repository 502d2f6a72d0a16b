"""The defaults of a models folder: which of its models answers a task where a request names none, in a file beside the bundles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from bertserve.service.errors import BundleError

DEFAULTS_FILE = "defaults.json"
_DEFAULTS = TypeAdapter(dict[str, str])


@dataclass(frozen=True, slots=True)
class FolderDefaults:
    """What one folder says.

    Attributes:
        path: Of its file.
        models: Task -> name of a model, tasks as `--default` takes them.
    """

    path: Path
    models: dict[str, str]


def read_defaults(folders: Sequence[Path]) -> list[FolderDefaults]:
    """Returns what the models folders say, in their order; most say nothing.

    Raises:
        BundleError: A file cannot be read, or is no JSON object of names.
    """
    return [_read(path) for folder in folders if (path := folder / DEFAULTS_FILE).exists()]


def _read(path: Path) -> FolderDefaults:
    try:
        return FolderDefaults(path, _DEFAULTS.validate_json(path.read_bytes(), strict=True))
    except OSError as error:
        raise BundleError(f"`{path}` cannot be read ({error.strerror}); make it readable, or remove it.") from error
    except ValidationError as error:
        raise BundleError(
            f'`{path}` is not a JSON object of tasks and names of models, such as {{"text-classification": "sentiment"}}: '
            f"{error.errors(include_url=False)[0]['msg']}."
        ) from error

"""A TOML file of settings, as a source of pydantic-settings: flags and variables override it, and it overrides defaults.

Each value is first validated separately, so that an error names the file and the key, and an invalid value is reported even if a flag
overrides it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

from bertserve.service.errors import SettingsError, did_you_mean, expectation

SETTING = "config"  # the setting that names the file; the file itself cannot name another


class ConfigFile(PydanticBaseSettingsSource):
    """The file that a flag or a variable names; without a file it is empty."""

    def __init__(self, settings_cls: Any, fields: Mapping[str, FieldInfo]) -> None:
        """Creates it from the class of the settings, and the `fields` that the file can contain."""
        super().__init__(settings_cls)
        self._known = {name: field for name, field in fields.items() if name != SETTING}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Is not called, because the file is read as a whole."""
        raise NotImplementedError

    def __call__(self) -> dict[str, Any]:
        """Returns the file's settings that no flag and no variable sets.

        Raises:
            SettingsError: The file cannot be read, is not TOML, or has an unknown key or a value with a wrong type.
        """
        path = self.current_state.get(SETTING)
        if path is None:
            return {}
        values = _read(Path(path))
        for name, value in values.items():
            self._check(path, name, value)
        return {name: value for name, value in values.items() if name in self.settings_cls.model_fields and name not in self.current_state}

    def _check(self, path: str, name: str, value: Any) -> None:
        if name not in self._known:
            hint = did_you_mean(name.replace("-", "_"), self._known, "see `bert-serve serve --help`, with `_` for `-`.")
            raise SettingsError(f"`{path}`: unknown setting `{name}`; {hint}")
        field = self._known[name]
        try:
            # validated as strict JSON: "8000" and true are not numbers, a path is a string, and there are no dates
            kind: Any = Annotated[field.annotation, Field(), *field.metadata]
            TypeAdapter(kind).validate_json(json.dumps(value, default=lambda _: [{}]), strict=True)
        except ValidationError as error:
            raise SettingsError(f"`{path}`: `{name}` is `{value}`: {expectation(error.errors(include_url=False)[0])}.") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config (or BERT_SERVE_CONFIG) is `{path}`, which cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise SettingsError(f"`{path}` is not TOML: {error}.") from error

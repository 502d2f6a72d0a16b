"""The file of --config: flags and variables override it, and each error in it is one line with the file and the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from bertserve.service.cli import main
from bertserve.service.errors import SettingsError
from bertserve.service.settings import Settings, parse

FILE = """
port = 1234
models = ["a", "b"]
access_log = true
shutdown_timeout_s = 2
min_agreement = 0.5
engine_cache = "engines"
precision = "fp32"
model = "org/model"

[default]
classify = "a"
ner = "b"
"""


@pytest.fixture(name="file")
def settings_file(tmp_path: Path) -> Path:
    path = tmp_path / "bertserve.toml"
    path.write_text(FILE)
    return path


def refused(path: Path, text: str | bytes, *flags: str) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError) as error:
        parse(Settings, ["--config", str(path), *flags])
    return error.value.message.replace(str(path), "FILE")


def test_settings_are_read_from_the_file(file: Path) -> None:
    read = parse(Settings, ["--config", str(file)])

    expected = {
        "config": file,
        "port": 1234,
        "models": (Path("a"), Path("b")),
        "access_log": True,
        "shutdown_timeout_s": 2.0,
        "min_agreement": 0.5,
        "engine_cache": Path("engines"),
        "precision": "fp32",
        "model": ("org/model",),
        "default": {"classify": "a", "ner": "b"},
    }
    assert expected == {name: getattr(read, name) for name in read.model_fields_set}


def test_flags_and_variables_override_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable can name the file, as the flag does. The file's other settings still apply."""
    monkeypatch.setenv("BERT_SERVE_CONFIG", str(file))
    monkeypatch.setenv("BERT_SERVE_PORT", "1")
    read = parse(Settings, ["--models", "c"])

    assert (1, (Path("c"),), True) == (read.port, read.models, read.access_log)
    assert 2 == parse(Settings, ["--port", "2"]).port


def test_commands_read_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.bundle(tmp_path / "own")
    file = tmp_path / "bertserve.toml"
    file.write_text(f'models = "{tmp_path}/own"')

    assert 0 == main(["models", "--json", "--config", str(file)])
    assert ["tiny"] == [model["name"] for model in json.loads(capsys.readouterr().out)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "`prot`; did you mean `port`?"),
        ("max-inputs = 1", "`max-inputs`; did you mean `max_inputs`?"),
        ('config = "other.toml"', "unknown setting"),
        ("[serve]\nport = 1", "unknown setting"),
        ("json = true", "unknown setting"),
    ],
)
def test_an_unknown_key_is_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(tmp_path / "f", text)


@pytest.mark.parametrize(
    "text",
    [
        "port = 70000",
        'port = "http"',
        "access_log = 2",
        "models = []",
        'models = ["a", 1]',
        'precision = "fp8"',
        'default = "classify"',
    ],
)
def test_an_invalid_value_is_refused(tmp_path: Path, text: str) -> None:
    name = text.partition(" = ")[0]
    assert f"`{name}` in the file of --config is" in refused(tmp_path / "f", text)
    assert f"--{name} (or " in refused(tmp_path / "f", text, "--port", "x") or name != "port"


@pytest.mark.parametrize("text", ["port = ", "port: 1", "[", b"\xff\xfe", "port = 1\nport = 2"])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, text: str | bytes) -> None:
    assert "TOML" in refused(tmp_path / "f", text)


@pytest.mark.parametrize("name", ["none", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="--config "):
        parse(Settings, ["--config", str(tmp_path / name)])

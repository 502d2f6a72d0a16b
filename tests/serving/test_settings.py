"""Flags override variables, variables override the file of --config, and the file overrides defaults. Errors name invalid settings."""

import json
from pathlib import Path

import pytest

from bertserve.service.cli import main
from bertserve.service.command_line import parse
from bertserve.service.errors import SettingsError
from bertserve.service.process import check_requirements
from bertserve.service.settings import Settings
from support import tiny


def test_every_setting_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(Settings, ["--help"])
    assert exit_info.value.code == 0
    page = capsys.readouterr().out
    assert [name for name in Settings.model_fields if f"--{name.replace('_', '-')}" not in page] == []
    assert [python for python in ("tuple[", "Path(", "None", "()", " str]", " int]") if python in page] == []


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "0", 0),
        ("models", "elsewhere", (Path("elsewhere"),)),
        ("provider", "cuda", "cuda"),
        ("shutdown_timeout_s", "0.5", 0.5),
        ("default", "classify=a,text-classification=b", {"classify": "a", "text-classification": "b"}),
    ],
)
def test_a_flag_and_its_variable_set_the_same_value(name: str, text: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert getattr(parse(Settings, [f"--{name.replace('_', '-')}", text]), name) == value
    monkeypatch.setenv(f"BERT_SERVE_{name.upper()}", text)
    assert getattr(parse(Settings, []), name) == value


@pytest.mark.parametrize("name", ["access_log", "batch_variant_graphs"])
def test_a_switch_is_a_flag_without_a_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flag = name.replace("_", "-")
    assert getattr(parse(Settings, [f"--{flag}"]), name) is True
    monkeypatch.setenv(f"BERT_SERVE_{name.upper()}", "true")
    assert getattr(parse(Settings, [f"--no-{flag}"]), name) is False


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("BERT_SERVE_PROT", "BERT_SERVE_PORT"),
        ("BERT_SERVE_MAX_INPUT", "BERT_SERVE_MAX_INPUTS"),
        ("BERT_SERVE_COLUMNS", "`bert-serve serve`"),
    ],
)
def test_an_unknown_variable_is_refused(variable: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled variable would have no effect, so it is an error that names the nearest setting."""
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=f"{variable}; .*{hint}"):
        parse(Settings, [])


LINKS = {
    "BERT_SERVE_SERVICE_HOST": "10.0.0.1",
    "BERT_SERVE_SERVICE_PORT": "8000",
    "BERT_SERVE_SERVICE_PORT_HTTP": "8000",
    "BERT_SERVE_PORT": "tcp://10.0.0.1:8000",
    "BERT_SERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "BERT_SERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
    "BERT_SERVE_PORT_8000_TCP_PORT": "8000",
    "BERT_SERVE_PORT_8000_TCP_PROTO": "tcp",
}


def test_variables_of_a_kubernetes_service_are_not_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a Service named bert-serve, Kubernetes sets variables that look like settings; they are ignored."""
    defaults = parse(Settings, [])
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    assert defaults == parse(Settings, [])
    monkeypatch.setenv("BERT_SERVE_PORT", "tcp:8000")
    with pytest.raises(SettingsError, match="BERT_SERVE_PORT"):
        parse(Settings, [])


@pytest.mark.parametrize(("flag", "near"), [("--prot", "--port"), ("--prot=1", "--port"), ("--no-acess-log", "--no-access-log")])
def test_the_error_for_an_unknown_flag_names_the_nearest_flag(flag: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(Settings, [flag])
    assert exit_info.value.code == 2
    assert near in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--timeout-ms 9 --max-timeout-ms 8", ("--timeout-ms is 9", "--max-timeout-ms", "8")),
        ("--max-chars 2000 --max-body-bytes 1999", ("--max-chars is 2000", "--max-body-bytes", "1999")),
        ("--max-concurrent-per-key 2", ("--api-key-file",)),
        ("--no-public-health", ("--api-key-file",)),
        ("--no-public-metrics", ("--api-key-file",)),
        ("--tls-cert=a.pem", ("--tls-cert", "--tls-key")),
        ("--tls-key=a.pem", ("--tls-cert", "--tls-key")),
        ("--default classify=a,classify=b", ("`classify`",)),
        ("--log-probes", ("without --access-log",)),
        ("--cors-origin app.example.com", ("such as https://",)),
    ],
)
def test_the_error_for_refused_settings_shows_values_and_other_settings(flags: str, names: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as error:
        check_requirements(parse(Settings, flags.split()))
    assert [name for name in names if name not in error.value.message] == []


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "70000"),
        ("--shutdown-timeout-s", "-1"),
        ("--shutdown-timeout-s", "inf"),
        ("--host", ""),
        ("--provider", "tpu"),
        ("--default", "tiny"),
        ("--default", "classify="),
        ("--cors-origin", "app.example.com"),
        ("--cors-origin", "https://app.example.com/"),
        ("--forwarded-allow-ips", "*"),
        ("--forwarded-allow-ips", "proxy"),
        ("--root-path", "bert"),
        ("--root-path", "/bert/"),
        ("--otlp-endpoint", "grpc://localhost:4317"),
        ("--otlp-endpoint", "http://"),
        ("--otlp-endpoint", "http://user:secret@host"),
        ("--otlp-endpoint", "http://host/?key=1"),
    ],
)
def test_a_value_out_of_range_or_of_a_wrong_form_is_refused(flag: str, value: str) -> None:
    with pytest.raises(SettingsError) as error:
        parse(Settings, [f"{flag}={value}"])
    assert error.value.message.startswith(f"{flag} (or BERT_SERVE_{flag[2:].upper().replace('-', '_')}) is `{value}`: ")


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


def config_error(path: Path, text: str | bytes, *flags: str) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError) as error:
        parse(Settings, ["--config", str(path), *flags])
    return error.value.message.replace(str(path), "FILE")


def test_settings_are_read_from_the_file(file: Path) -> None:
    settings = parse(Settings, ["--config", str(file)])

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
    assert {name: getattr(settings, name) for name in settings.model_fields_set} == expected


def test_flags_and_variables_override_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BERT_SERVE_CONFIG", str(file))
    monkeypatch.setenv("BERT_SERVE_PORT", "1")
    settings = parse(Settings, ["--models", "c"])

    assert (settings.port, settings.models, settings.access_log) == (1, (Path("c"),), True)
    assert parse(Settings, ["--port", "2"]).port == 2


def test_commands_read_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.bundle(tmp_path / "own")
    file = tmp_path / "bertserve.toml"
    file.write_text(f'models = "{tmp_path}/own"')

    assert main(["models", "--json", "--config", str(file)]) == 0
    assert [model["name"] for model in json.loads(capsys.readouterr().out)] == ["tiny"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "`prot`; did you mean `port`?"),
        ("max-inputs = 1", "`max-inputs`; did you mean `max_inputs`?"),
        ('config = "other.toml"', "unknown setting"),
        ("[serve]\nport = 1", "unknown setting"),
        ("json = true", "unknown setting"),
        *((f"port = {value}", "`port`") for value in ("70000", '"http"')),
        ("access_log = 2", "`access_log`"),
        *((f"models = {value}", "`models`") for value in ("[]", '["a", 1]')),
        ('precision = "fp8"', "`precision`"),
        ('default = "classify"', "`default`"),
        *((text, "TOML") for text in ("port = ", "port: 1", "[", b"\xff\xfe", "port = 1\nport = 2")),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str | bytes, words: str) -> None:
    """A key is unknown, a value is invalid, or the file is not TOML."""
    assert words in config_error(tmp_path / "f", text)


def test_the_flag_is_named_if_it_is_wrong_too(tmp_path: Path) -> None:
    assert "--port (or " in config_error(tmp_path / "f", "port = 70000", "--port", "x")


@pytest.mark.parametrize("name", ["none", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="--config "):
        parse(Settings, ["--config", str(tmp_path / name)])

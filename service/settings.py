"""Settings of `bert-serve`, from flags over BERT_SERVE_* variables over defaults. Frozen; below the composition root only values go."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliApp, NoDecode, SettingsConfigDict

from service.errors import SettingsError

PREFIX = "BERT_SERVE_"
# enableServiceLinks of a pod: BERT_SERVE_SERVICE_HOST, BERT_SERVE_PORT=tcp://..., BERT_SERVE_PORT_8000_TCP_ADDR and so on
_SERVICE_LINK = re.compile("SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?")
_SERVICE_ADDRESS = re.compile("(tcp|udp|sctp)://")


def _pairs(value: Any) -> Any:
    """Reads `TASK=NAME,TASK=NAME`."""
    if not isinstance(value, str):
        return value
    items = [item.partition("=") for item in value.split(",") if item]
    if any(not (task and equals and name) for task, equals, name in items):
        raise ValueError("must be TASK=NAME, several separated by commas")
    tasks = [task.strip() for task, _, _ in items]
    if twice := [task for task in tasks if tasks.count(task) > 1]:
        raise ValueError(f"names a model for `{twice[0]}` twice; leave one out")
    return {task.strip(): name.strip() for task, _, name in items}


def _paths(value: Any) -> Any:
    """Reads `PATH,PATH`, or a path for each time that a flag was given."""
    given = value if isinstance(value, list | tuple) else [value]
    paths = [part for item in given for part in (str(item).split(",") if isinstance(item, str) else [item])]
    if not paths or "" in paths:
        raise ValueError("must be a path, several separated by commas")
    return tuple(Path(path) for path in paths)


Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_paths)]
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)]


class Settings(BaseSettings):
    """Every knob of the service. Each is a flag `--like-this` and a variable `BERT_SERVE_LIKE_THIS`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        frozen=True,
        extra="forbid",
        env_prefix_target="all",  # former names are aliases, and variables too
        populate_by_name=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    host: str = Field("127.0.0.1", description="Address to listen on. Anything but loopback should have an API key.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one and prints it.")
    models: Paths = Field(
        (Path("models"),),
        description="Folder of bundles, one folder a model; all are loaded. May be given several times, or as a comma list.",
    )
    skip_broken: bool = Field(
        False, description="Serve the other models where one cannot be loaded, and show it in `/models`; otherwise that is an error."
    )
    provider: Literal["auto", "cpu", "cuda", "tensorrt"] = Field(
        "auto", description="ONNX Runtime execution provider; auto takes CUDA where it is available."
    )
    allow_provider_fallback: bool = Field(
        False, description="Serve on the CPU, with a loud warning, where the provider cannot be had; otherwise that is an error."
    )
    engine_cache: Path | None = Field(
        None, description="Folder for the engines that TensorRT builds, which takes minutes; without it they are built at every start."
    )
    precision: Literal["auto", "fp32", "fp16", "int8"] = Field(
        "auto", description="Graph to take from each bundle; auto takes the provider's default."
    )
    require_evidence: bool = Field(False, description="Refuse bundles whose graph was not compared with its checkpoint at export.")
    min_agreement: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Refuse graphs whose answers agreed with the checkpoint's on a smaller share of the parity inputs.",
    )
    lanes: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Batches that run at once, one thread each; by default the cores the process may use, or 1 on a GPU.",
    )
    solo_threads: int | None = Field(
        None,
        ge=1,
        le=256,
        validation_alias=AliasChoices("solo_threads", "idle_threads"),
        description="Threads of a solo run: one beside which no other runs or waits, on a CPU; by default the lanes, at most 4. "
        "1 saves the memory of a second session of each model. `idle_threads` is its former name.",
    )
    workers: int = Field(
        1, ge=1, le=256, description="Processes that serve the one port; lanes and queue are divided among them. Each loads every model."
    )
    batch_variant_graphs: bool = Field(
        False, description="Batch texts also on graphs whose scores then move with a text's neighbors (dynamic int8)."
    )
    max_batch_tokens: int = Field(8192, ge=16, description="Budget of a batch: rows times padded length.")
    max_queue_tokens: int = Field(524288, ge=16, description="Tokens that may be admitted and unfinished; more are refused with 429.")
    max_inputs: int = Field(512, ge=1, le=16384, description="Inputs in one request.")
    max_body_bytes: int = Field(8388608, ge=1024, description="Bytes of a request body.")
    max_chars: int = Field(200000, ge=1, description="Characters of one text.")
    timeout_ms: int = Field(30000, ge=1, description="Deadline of a request that names none, until its last text has started.")
    max_timeout_ms: int = Field(120000, ge=1, description="Longest deadline that `x-request-timeout-ms` may ask for.")
    grace_s: float = Field(30, ge=0, description="Seconds that a stopping service goes on answering what it has admitted.")
    drain_s: float = Field(
        0, ge=0, description="Seconds before, in which readiness is red and all else goes on, for load balancers to notice."
    )
    keep_alive_s: int = Field(75, ge=1, description="Seconds an idle connection stays open; more than the load balancer's.")
    head_timeout_s: float = Field(10, gt=0, description="Seconds for the head of a request, from its first byte.")
    max_head_bytes: int = Field(32768, ge=1024, description="Bytes of the request line and the headers.")
    body_timeout_s: float = Field(
        30, gt=0, description="Seconds for a request, from its first byte; a body may take longer at --min-body-rate."
    )
    min_body_rate: int = Field(65536, ge=1, description="Bytes a second at which a body may take longer than --body-timeout-s.")
    max_connections: int | None = Field(
        None, ge=1, description="Open connections of each worker; by default as many as descriptors allow, at most 4096."
    )
    default: Pairs = Field(
        default_factory=dict, description="TASK=NAME: the model that a task's endpoint uses (comma list; default: the first by name)."
    )
    api_key_file: Path | None = Field(
        None,
        description="File of API keys, one a line; callers must send one of them as a Bearer token. `bert-serve new-key NAME` makes one.",
    )
    admin_key_file: Path | None = Field(
        None, description="File of API keys that may load, reload and unload models; without it nobody may."
    )
    max_concurrent_per_key: int | None = Field(
        None, ge=1, description="Requests that one API key may have under way in a worker; more get 429."
    )
    open_health: bool = Field(True, description="Answer health paths without a key.")
    open_metrics: bool = Field(True, description="Answer /metrics without a key.")
    access_log: bool = Field(False, description="Log a line for each request.")
    log_format: Literal["text", "json"] = Field("text", description="Form of log lines.")

    @model_validator(mode="after")
    def _no_contradictions(self) -> Settings:
        for less, more in (("max_batch_tokens", "max_queue_tokens"), ("timeout_ms", "max_timeout_ms"), ("max_chars", "max_body_bytes")):
            if getattr(self, less) > getattr(self, more):
                raise ValueError(
                    f"{_flag(less)} is {getattr(self, less)}, over {_flag(more)}, which is {getattr(self, more)}; lower the one or raise the other"
                )
        if self.lanes is not None and self.workers > self.lanes:
            raise ValueError(f"--workers is {self.workers}, over --lanes, which is {self.lanes}; each worker needs a lane of its own")
        for name in ("max_concurrent_per_key", "open_health", "open_metrics"):
            if self.api_key_file is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{_flag(name)} does nothing without --api-key-file; give that too")
        if self.max_batch_tokens > self.max_queue_tokens // self.workers:
            raise ValueError(
                f"--max-queue-tokens is {self.max_queue_tokens}, which gives each of {self.workers} workers less than "
                f"--max-batch-tokens, which is {self.max_batch_tokens}; raise the one or lower the other"
            )
        return self


_Command = TypeVar("_Command", bound=BaseSettings)


def parse(command: type[_Command], args: Sequence[str]) -> _Command:
    """Reads a command line over the environment over the defaults.

    Args:
        command: Settings, or settings with subcommands.
        args: The arguments behind the program's name.

    Raises:
        SettingsError: A value is wrong, two contradict each other, or a BERT_SERVE_* variable is no setting.
        SystemExit: `--help`, or a flag or subcommand that does not exist (code 2).
    """
    _drop_service_links()
    _refuse_unknown_variables()
    try:
        return CliApp.run(command, cli_args=list(args))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        name = str(first["loc"][-1]) if first["loc"] else ""
        if name not in setting_names():
            raise SettingsError(f"{message}.") from error
        raise SettingsError(f"{_flag(name)} (or {PREFIX}{name.upper()}) is `{first['input']}`: {message}.") from error


def setting_names() -> list[str]:
    """Returns the names of all settings, former ones that are still read included."""
    aliases = (field.validation_alias for field in Settings.model_fields.values())
    also = [str(name) for alias in aliases if isinstance(alias, AliasChoices) for name in alias.choices]
    return list(dict.fromkeys([*Settings.model_fields, *also]))


def _drop_service_links() -> None:
    """Takes what Kubernetes sets for a Service named bert-serve out of the environment: its names are like those of settings."""
    for name, value in list(os.environ.items()):
        rest = name.removeprefix(PREFIX)
        if rest != name and (_SERVICE_LINK.fullmatch(rest) or (rest == "PORT" and _SERVICE_ADDRESS.match(value))):
            del os.environ[name]


def _refuse_unknown_variables() -> None:
    known = [name.upper() for name in setting_names()]
    for name in os.environ:
        if name.startswith(PREFIX) and (given := name.removeprefix(PREFIX)) not in known:
            near = difflib.get_close_matches(given, known, n=1)
            raise SettingsError(
                f"the variable {name} is no setting"
                + (f"; did you mean {PREFIX}{near[0]}?" if near else "; see `bert-serve serve --help`.")
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

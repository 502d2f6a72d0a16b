"""Settings of `bert-serve` from flags, BERT_SERVE_* variables, a file and defaults, in this order."""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, IPvAnyNetwork
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from bertserve.service.errors import SettingsError
from bertserve.service.messages import did_you_mean
from bertserve.service.providers import ProviderChoice

ENV_PREFIX = "BERT_SERVE_"
GPU_BATCH_TOKENS = 16384  # tokens of a batch in fp16 that suit the largest GPUs (8 to 16 thousand tokens per launch)
# the options of pydantic-settings that all commands share
CLI_CONFIG = SettingsConfigDict(
    env_prefix=ENV_PREFIX,
    cli_kebab_case=True,
    cli_implicit_flags=True,
    cli_hide_none_type=True,
    cli_avoid_json=True,
    cli_exit_on_error=False,
)


def _pairs(value: Any) -> Any:
    """Reads `TASK=NAME,TASK=NAME`."""
    if not isinstance(value, str):
        return value
    items = [item.partition("=") for item in value.split(",") if item]
    if any(not (task and equals and name) for task, equals, name in items):
        raise ValueError("must be TASK=NAME, or several separated by commas")
    tasks = [task.strip() for task, _, _ in items]
    if duplicates := [task for task in tasks if tasks.count(task) > 1]:
        raise ValueError(f"names two models for `{duplicates[0]}`; remove one")
    return {task.strip(): name.strip() for task, _, name in items}


def _split(value: Any) -> Any:
    """Reads `ONE,TWO`, or one value per use of the flag."""
    values = value if isinstance(value, list | tuple) else [value]
    parts = [part for item in values for part in (map(str.strip, item.split(",")) if isinstance(item, str) else [item])]
    if values and not any(parts):
        raise ValueError("must not be empty; separate several with commas")
    return tuple(part for part in parts if part != "")


def _origin(value: str) -> str:
    if not re.fullmatch(r"https?://[^/?#@\s]+|\*", value):
        raise ValueError("must be an origin, such as https://app.example.com, without a path, or *")
    return value


T = TypeVar("T")
Separated = Annotated[tuple[T, ...], NoDecode, BeforeValidator(_split)]
Origin = Annotated[str, AfterValidator(_origin)]
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)]


class ConfigFile(InitSettingsSource):
    """The TOML file that --config or BERT_SERVE_CONFIG names; flags and variables override it."""

    def __call__(self) -> dict[str, Any]:
        """Returns the file's settings that no flag and no variable sets.

        Raises:
            SettingsError: The file cannot be read, is not TOML, or contains an unknown key.
        """
        if (path := self.current_state.get("config")) is None:
            return {}
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"--config (or {ENV_PREFIX}CONFIG) is `{path}`, which cannot be read as TOML: {error}.") from error
        known = Settings.model_fields.keys() - {"config"}
        if unknown := [name for name in values if name not in known]:
            hint = did_you_mean(unknown[0].replace("-", "_"), sorted(known), "see `bert-serve serve --help`, with `_` for `-`.")
            raise SettingsError(f"`{path}`: unknown setting `{unknown[0]}`; {hint}")
        return {name: values[name] for name in values.keys() - self.current_state.keys() if name in self.settings_cls.model_fields}


class ModelSettings(BaseSettings):
    """The models, how they run, and the limits of requests.

    A setting of `serve` is a flag `--like-this`, a variable `BERT_SERVE_LIKE_THIS`, and a key of the file. All commands read the same
    variables and file, and ignore settings that they do not use. A flag must be one of the command's. Settings of other commands are only
    flags.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False, **CLI_CONFIG)

    config: Path | None = Field(None, description="TOML file with settings; flags and environment variables take precedence.")
    models: Separated[Path] = Field(
        (Path("models"),), min_length=1, description="Folder of bundles, all of which are loaded; repeat the flag or separate with commas."
    )
    model: Separated[str] = Field(
        (),
        description="SOURCE or NAME=SOURCE: a checkpoint folder, hub id (ID@REVISION) or bundle; a checkpoint is exported once, into the "
        "cache. Repeat the flag or separate with commas. Without --models, only these models are served.",
    )
    cache_dir: Path | None = Field(None, description="Folder for the exports of --model (default: `bertserve` in the user's cache folder).")
    provider: ProviderChoice = Field("auto", description="ONNX Runtime execution provider; auto uses CUDA if it is available.")
    allow_provider_fallback: bool = Field(
        False, description="Use the CPU, with a warning, if the provider is unavailable; otherwise this is an error."
    )
    precision: Literal["auto", "fp32", "fp16", "int8"] = Field(
        "auto", description="Precision of the graph to load; auto uses the provider's default graph."
    )
    engine_cache: Path | None = Field(
        None, description="Folder for TensorRT engines; without it every start builds them, which takes minutes."
    )
    device_id: int = Field(0, ge=0, description="Index of the GPU, of those that the process can use.")
    gpu_mem_limit_mib: int | None = Field(
        None,
        ge=1,
        description="Maximum MiB of the GPU's memory for the weights and tensors of one CUDA session (default: no limit). A model has one "
        "session, and one more per inference thread with --cuda-graphs.",
    )
    cuda_graphs: bool = Field(
        True, description="Replay small runs of fp16 graphs on CUDA as CUDA graphs; each inference thread has its own copy of the weights."
    )
    require_validation: bool = Field(
        False, description="Refuse graphs that were not validated against their checkpoint on this provider and in this precision."
    )
    min_agreement: float | None = Field(
        None, ge=0, le=1, description="Refuse graphs whose measured agreement with the checkpoint is lower or missing."
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Inference threads of all workers together, at least one per worker; each runs one batch at a time (default: the "
        "usable cores, or 2 on a GPU).",
    )
    batch_variant_graphs: bool = Field(
        False, description="Batch texts even on graphs whose scores depend on the other texts of the batch (dynamic int8)."
    )
    max_batch_tokens: int | None = Field(
        None, ge=16, description="Maximum tokens of a batch: rows times padded length (default: 8192, or 16384 for fp16)."
    )
    max_inputs: int = Field(512, ge=1, le=8192, description="Maximum inputs of a request.")
    max_chars: int = Field(80000, ge=1, description="Maximum characters of a text.")
    max_top_k: int = Field(100, ge=5, le=1000, description="Maximum `top_k` of /fill-mask, whose default is 5, and /answer.")
    log_format: Literal["text", "json"] = Field("text", description="Format of log lines.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns the sources of settings in order of precedence; flags precede all of them."""
        return init_settings, env_settings, ConfigFile(settings_cls, {})

    def batch_tokens(self, precision: str) -> int:
        """Returns the maximum tokens of a batch of a graph in this precision."""
        return self.max_batch_tokens or (GPU_BATCH_TOKENS if precision == "fp16" else 8192)


class ScoreSettings(ModelSettings):
    """Options of `score` for rows and their columns. These settings are only flags."""

    task: str | None = Field(
        None, description="Name of the task or of its endpoint (default: the model's own, or the one that parameters or columns imply)."
    )
    columns: dict[str, str] = Field(
        {}, description="INPUT=COLUMN of the task's inputs, such as text=review, or a JSON object (default: columns named like inputs)."
    )
    parameters: dict[str, Any] = Field({}, description="Parameters of each request as JSON, such as '{\"top_k\": 1}'.")
    prediction_column: str = Field("prediction", min_length=1, description="Column for predictions.")
    warnings_column: str = Field("warnings", min_length=1, description="Column for warnings.")
    json_cells: bool = Field(False, description="In CSV and TSV, write each prediction as JSON, and the warnings as a JSON list.")
    empty: Literal["warn", "reject"] = Field("warn", description="Whether a row whose text is empty gets a warning or is rejected.")

    @property
    def added_columns(self) -> tuple[str, str]:
        """The columns of the output that the input lacks."""
        return self.prediction_column, self.warnings_column

    def affecting_answers(self) -> dict[str, Any]:
        """Returns the settings that are set and affect answers, without settings that are only about a machine."""
        machine = {"threads", "device_id", "engine_cache", "gpu_mem_limit_mib", "cuda_graphs"}
        local = {"config", "models", "model", "cache_dir", "log_format", *machine}
        return self.model_dump(include=ScoreSettings.model_fields.keys() - local, exclude_unset=True)


class Settings(ModelSettings):
    """All settings of the service. Each flag is also a BERT_SERVE_* variable, and a key of the file of --config."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; use an API key unless it is loopback.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free port and prints it.")
    tls_cert: Path | None = Field(
        None, description="PEM file with the certificate chain; with --tls-key the service speaks HTTPS (TLS 1.2 or newer)."
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key, without a password.")
    api_key_file: Path | None = Field(
        None, description="File with one API key per line, which callers send as a Bearer token; `bert-serve new-key NAME` creates keys."
    )
    public_health: bool = Field(True, description="Answer health paths without an API key.")
    multi_threads: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Threads of a multi-threaded run on an idle CPU (default: the threads of a worker, at most 4); 1 saves the memory of "
        "a second session per model.",
    )
    max_body_bytes: int = Field(2097152, ge=1024, description="Maximum bytes of a request body.")
    max_queue_tokens: int = Field(524288, ge=16, description="Maximum admitted, unfinished tokens; requests over it get 429.")
    skip_broken: bool = Field(
        False, description="Serve the other models if one cannot be loaded, and list it in /models; otherwise this is an error."
    )
    workers: int = Field(
        1,
        ge=1,
        le=256,
        description="Processes that share the port; --threads and --max-queue-tokens are divided among them, and each loads every model.",
    )
    max_concurrent: int = Field(1024, ge=1, description="Maximum open requests to models per worker; more get 503.")
    max_concurrent_per_key: int | None = Field(
        None, ge=1, description="Maximum open requests to models per API key and worker; more get 429 (default: no limit)."
    )
    max_stream_requests: int = Field(32, ge=1, le=4096, description="Maximum lines of a stream in progress, of 2 KiB on average.")
    timeout_ms: int = Field(30000, ge=1, description="Default deadline in ms: all inputs of a request must have started by then.")
    max_timeout_ms: int = Field(120000, ge=1, description="Longest deadline in ms that a request can set.")
    shutdown_timeout_s: float = Field(30, ge=0, description="Seconds to finish admitted requests during shutdown.")
    pre_stop_delay_s: float = Field(
        0, ge=0, description="Seconds to report not-ready before shutdown starts, so that load balancers stop sending traffic."
    )
    keep_alive_s: int = Field(
        75, ge=1, description="Seconds until an idle connection is closed; set more than the load balancer's idle timeout."
    )
    header_timeout_s: float = Field(
        10, gt=0, description="Seconds until the first byte of a new connection, and then to receive the request line and headers."
    )
    max_header_bytes: int = Field(
        32768, ge=1024, description="Maximum bytes of request line and headers; also of a body's trailers and chunk extensions."
    )
    body_timeout_s: float = Field(30, gt=0, description="Seconds to receive the body of a request.")
    default: Pairs = Field(
        default_factory=dict, description="TASK=NAME, separated by commas: default model of a task; needed if several models can answer it."
    )
    allow_implicit_default: bool = Field(
        False, description="If several models can be a task's default and --default names none, use the first by name instead of failing."
    )
    admin_key_file: Path | None = Field(
        None, description="File with API keys that can load, reload and unload models; without it model management is disabled."
    )
    public_metrics: bool = Field(True, description="Answer /metrics without an API key.")
    root_path: str = Field(
        "",
        pattern="^(/[A-Za-z0-9._~-]+)*$",
        description="Path prefix under which a proxy exposes the service, such as /bert; requests work with and without it.",
    )
    forwarded_allow_ips: Separated[IPvAnyNetwork] = Field(
        (), description="Addresses or networks of proxies, separated by commas, whose X-Forwarded-For is used in the log."
    )
    cors_origin: Separated[Origin] = Field((), description="Origins, separated by commas, or *, whose pages can read answers in a browser.")
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/?#@\s]+(/[^?#\s]*)?$",
        description="URL of an OpenTelemetry collector, such as http://localhost:4318, that gets a trace of each request by OTLP over "
        "HTTP. Needs the extra `otel`; OTEL_* variables configure the rest.",
    )
    access_log: bool = Field(False, description="Log one line per request, except probes and scrapes of /metrics.")
    log_probes: bool = Field(False, description="Log probes and scrapes too; needs --access-log.")


def to_address(host: str, port: int) -> str:
    """Returns a host and a port as in a URL, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def to_flag(name: str) -> str:
    """Returns the flag of a setting."""
    return "--" + name.replace("_", "-")

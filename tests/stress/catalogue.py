"""The catalogue of attacks: on each field of a request body, on each feature of the protocol, and on each setting that limits callers."""

from __future__ import annotations

from attack import Attack
from body_attacks import body_attacks
from field_attacks import field_attacks
from protocol_attacks import protocol_attacks

# Setting -> name of the attack that reaches and exceeds its limit.
ATTACK_ON_SETTING: dict[str, str] = {
    "threads": "explain the longest text",
    "multi_threads": "all windows of many texts",
    "workers": "silent connections",
    "max_batch_tokens": "all windows of many texts",
    "max_queue_tokens": "all windows of many texts",
    "max_inputs": "a body of any task at the base URL",
    "max_body_bytes": "bodies without their last byte",
    "max_stream_requests": "a stream of short texts",
    "max_chars": "field ClassifyBody.inputs",
    "timeout_ms": "answers for many questions",
    "max_timeout_ms": "headers of numbers",
    "keep_alive_s": "silent connections",
    "header_timeout_s": "slow heads",
    "max_header_bytes": "a head without end",
    "body_timeout_s": "slow bodies",
    "min_body_rate": "slow bodies",
    "max_connections": "silent connections",
    "api_key_file": "wrong keys",
    "admin_key_file": "wrong keys",
    "max_concurrent_per_key": "pipelined requests",
    "tls_cert": "handshakes",
    "tls_key": "half of a TLS hello",
}
# Settings that do not limit callers.
WITHOUT_LIMIT = frozenset(
    "config host port models model cache_dir skip_broken provider allow_provider_fallback engine_cache precision require_validation "
    "min_agreement batch_variant_graphs shutdown_timeout_s pre_stop_delay_s default allow_implicit_default public_health public_metrics root_path forwarded_allow_ips "
    "cors_origin otlp_endpoint access_log log_probes pid_file log_format".split()
)

ATTACKS: tuple[Attack, ...] = (*protocol_attacks(), *body_attacks(), *field_attacks())

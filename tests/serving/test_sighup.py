"""SIGHUP: all workers reload keys, the certificate and models while they answer requests; and TLS."""

import shutil
import signal
import ssl
from pathlib import Path

import httpx
import pytest
import trustme

from bertserve.service.cli import main
from bertserve.service.errors import SettingsError
from bertserve.service.process import check_requirements
from bertserve.service.settings import Settings
from support import tiny, wait_until
from support.replica import BERT_SERVE, ServeProcess, running

AUTHORITY = trustme.CA()
BODY = {"inputs": "good"}


def certificate_files(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """Writes a certificate for a name and its private key, and returns their paths."""
    certificate = AUTHORITY.issue_cert(name, "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    return folder / "cert.pem", folder / "key.pem"


def statuses(server: ServeProcess, key: str, path: str = "/models/tiny") -> set[int]:
    """Returns the statuses of requests on separate connections, so that all workers get some."""
    headers = {"authorization": f"Bearer {key}", "connection": "close"}
    return {httpx.post(server.url + path, json=BODY, headers=headers, trust_env=False).status_code for _ in range(6)}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.full_grid), 2])
def test_sighup_reloads_keys_and_models(models: Path, tmp_path: Path, workers: int) -> None:
    (tmp_path / "keys").write_text("one")
    flags = ("--workers", str(workers), "--threads", str(workers), "--api-key-file", str(tmp_path / "keys"))
    with running(models, tmp_path / "log", *flags) as server:
        assert statuses(server, "one") == {200}
        (tmp_path / "keys").write_text("two")
        shutil.rmtree(models / "tiny")
        tiny.bundle(models, "other")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.log.read_text().count("the model tiny is unloaded") == workers)
        assert [statuses(server, "two", path) for path in ("/models/other", "/models/tiny")] == [{200}, {404}]
        assert statuses(server, "one") == {401}
        server.process.send_signal(signal.SIGHUP)
        assert statuses(server, "two", "/models/other") == {200}
        assert server.process.poll() is None
    assert "Traceback" not in server.log.read_text()
    assert (" worker 1] bertserve.loading: the model tiny is unloaded" in server.log.read_text()) == (workers == 2)


CHANGED = f"""
from pathlib import Path
from bertserve.service.server import serve

read_keys = serve.read_keys

def changed(settings):
    auth = read_keys(settings)
    Path(settings.api_key_file).write_text("two")
    return auth

serve.read_keys = changed
{BERT_SERVE}
"""


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.full_grid)])
def test_a_key_that_is_removed_during_startup_is_invalid(models: Path, tmp_path: Path, workers: str) -> None:
    (tmp_path / "keys").write_text("one")
    flags = ("--workers", workers, "--threads", workers, "--api-key-file", str(tmp_path / "keys"))
    with running(models, tmp_path / "log", *flags, program=CHANGED) as server:
        assert (statuses(server, "one"), statuses(server, "two")) == ({401}, {200})


def certificate_of(server: ServeProcess) -> str:
    """Returns the certificate that a new connection gets."""
    return ssl.get_server_certificate(server.address)


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.full_grid)])
def test_the_service_supports_tls_and_sighup_reloads_a_valid_certificate(models: Path, tmp_path: Path, workers: str) -> None:
    chain, key = certificate_files(tmp_path)
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    flags = ("--workers", workers, "--threads", workers)
    with running(models, tmp_path / "log", "--tls-cert", str(chain), "--tls-key", str(key), *flags) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=context, trust_env=False) as client:
            assert client.post("/classify", json=BODY).status_code == 200
            assert client.post("/classify", json={"inputs": ["good"] * 400}).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(server.url, verify=ssl.create_default_context(), trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http"), trust_env=False)

        first = certificate_of(server)
        certificate_files(tmp_path)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: certificate_of(server) != first)
        second = certificate_of(server)
        key.write_text("invalid")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.log.read_text().count("--tls-key") == int(workers))

        assert certificate_of(server) == second
        assert server.log.read_text().count("reloaded the certificate") == int(workers)
    assert "Traceback" not in server.log.read_text()


def test_the_health_command_uses_the_settings_of_the_service(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, key = certificate_files(tmp_path)
    (tmp_path / "keys").write_text("swordfish")
    settings = {"host": "0.0.0.0", "tls_cert": chain, "tls_key": key, "api_key_file": tmp_path / "keys", "public_health": False}
    for name, value in settings.items():
        monkeypatch.setenv(f"BERT_SERVE_{name.upper()}", str(value))
    with running(models, tmp_path / "log") as server:
        monkeypatch.setenv("BERT_SERVE_PORT", server.url.rpartition(":")[2])
        monkeypatch.setenv("BERT_SERVE_TIMEOUT_MS", "200000")  # as if a flag of serve had raised the maximum
        assert main(["health"]) == 0
    assert main(["health"]) == 1


def test_an_unusable_certificate_is_refused(tmp_path: Path) -> None:
    chain, key = certificate_files(tmp_path)
    (tmp_path / "other").mkdir()
    for files in ((chain, tmp_path / "none"), (key, key), (chain, certificate_files(tmp_path / "other")[1])):
        with pytest.raises(SettingsError, match="--tls-cert"):
            check_requirements(Settings(tls_cert=files[0], tls_key=files[1]))

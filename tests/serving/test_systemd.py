"""Messages of a service to systemd with `Type=notify`: ready, watchdog and stopping."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.serial

Serve = Callable[..., Any]


@pytest.mark.parametrize("workers", [1, 2])
def test_systemd_is_told(models: Path, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(20)
        systemd.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def heard() -> str:
            message, credentials, _, _ = systemd.recvmsg(200, 100)
            [(_, _, sender)] = credentials
            assert int.from_bytes(sender[:4], "little") == served.process.pid
            return message.decode()

        with serve(models, "--workers", str(workers), "--threads", str(workers)) as served:
            before = []
            while not (ready := heard()).startswith("READY="):
                before.append(ready)
            assert ready == f"READY=1\nSTATUS=listens on {served.url}"
            assert {*before, *(heard() for _ in range(3))} == {"WATCHDOG=1"}
            served.process.send_signal(signal.SIGTERM)
            while (message := heard()) == "WATCHDOG=1":
                pass
            assert message == "STOPPING=1"
    assert "Traceback" not in served.log.read_text()

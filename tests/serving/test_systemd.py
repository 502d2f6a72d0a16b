"""Messages of a service to systemd with `Type=notify`: ready, watchdog and stopping."""

import signal
import socket
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from support.replica import running


@pytest.mark.parametrize("workers", [1, 2])
def test_systemd_gets_the_messages_of_the_service(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    messages: SimpleQueue[tuple[int, str]] = SimpleQueue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        address = str(tmp_path / "notify") if workers == 1 else f"@{tmp_path}"  # a path or an abstract socket
        systemd.bind(address.replace("@", "\0"))
        monkeypatch.setenv("NOTIFY_SOCKET", address)

        def listen() -> None:
            """Reads all messages at once, because the service waits while ten of them are unread."""
            while True:
                message, [(_, _, sender)], _, _ = systemd.recvmsg(200, 100)
                messages.put((int.from_bytes(sender[:4], "little"), message.decode()))

        def next_message() -> str:
            """Returns the next message of the service that does not come from its watchdog."""
            while (first := messages.get(timeout=20)) == (server.process.pid, "WATCHDOG=1"):
                pass
            assert first[0] == server.process.pid
            return first[1]

        threading.Thread(target=listen, daemon=True).start()
        with running(models, tmp_path / "log", "--workers", str(workers), "--threads", str(workers)) as server:
            assert next_message() == f"READY=1\nSTATUS=listens on {server.url}"
            assert messages.get(timeout=20) == (server.process.pid, "WATCHDOG=1")
            server.process.send_signal(signal.SIGTERM)
            assert next_message() == "STOPPING=1"
    assert "Traceback" not in server.log.read_text()

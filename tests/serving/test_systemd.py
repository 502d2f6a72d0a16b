"""Messages of a service to systemd with `Type=notify`: ready, watchdog and stopping."""

import signal
import socket
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from replica import running


@pytest.mark.parametrize("workers", [1, 2])
def test_systemd_gets_the_messages_of_the_service(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    heard: SimpleQueue[tuple[int, str]] = SimpleQueue()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        def listen() -> None:
            """Reads all messages at once, because the service waits while ten of them are unread."""
            while True:
                message, [(_, _, sender)], _, _ = systemd.recvmsg(200, 100)
                heard.put((int.from_bytes(sender[:4], "little"), message.decode()))

        def heard_next() -> str:
            """Returns the next message of the service that does not come from its watchdog."""
            while (found := heard.get(timeout=20)) == (served.process.pid, "WATCHDOG=1"):
                pass
            assert served.process.pid == found[0]
            return found[1]

        threading.Thread(target=listen, daemon=True).start()
        with running(models, tmp_path / "log", "--workers", str(workers), "--threads", str(workers)) as served:
            assert f"READY=1\nSTATUS=listens on {served.url}" == heard_next()
            assert (served.process.pid, "WATCHDOG=1") == heard.get(timeout=20)
            served.process.send_signal(signal.SIGTERM)
            assert "STOPPING=1" == heard_next()
    assert "Traceback" not in served.log.read_text()

"""Replicas that stop, die or hang behind a real HAProxy or nginx, under a load without pauses."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from support import slow, wait_until
from support.balanced import Balanced, balanced, load
from support.replica import PROXIES, ServeProcess

pytestmark = [pytest.mark.serial, pytest.mark.skipif(not all(map(shutil.which, PROXIES)), reason="haproxy or nginx is not installed")]

CLIENTS = 48


def signal_one(service: Balanced, number: signal.Signals) -> ServeProcess:
    [first, *_] = service.replicas
    first.process.send_signal(number)
    return first


@pytest.mark.parametrize(
    ("proxy", "pre_stop_delay_s"),
    [
        ("haproxy", "0"),
        pytest.param("haproxy", "2", marks=pytest.mark.full_grid),
        pytest.param("nginx", "0", marks=pytest.mark.full_grid),
        pytest.param("nginx", "2", marks=pytest.mark.full_grid),
    ],
)
def test_a_rolling_restart_fails_no_request(models: Path, tmp_path: Path, proxy: str, pre_stop_delay_s: str) -> None:
    """Replicas restart one after the other. Without a pre-stop delay, the proxy sends refused requests to the other replica."""
    with balanced(models, tmp_path, "--pre-stop-delay-s", pre_stop_delay_s, proxy=proxy) as service:
        with load(service.proxy.url, CLIENTS) as result:
            for each in service.replicas:
                before = each.process.pid
                assert each.stop() == 0
                each.start()
                assert before != each.process.pid
                service.wait_until_all_serve()
        print(f"{proxy}, delay {pre_stop_delay_s} s: {result}")
    assert result.failed == {}
    assert result.outcomes[200] > CLIENTS


@pytest.mark.full_grid
def test_a_replica_that_is_killed_under_load_fails_no_request(tmp_path: Path) -> None:
    """The proxy sends its running and queued requests to the other replica."""
    slow.bundle(tmp_path / "slow")
    with balanced(tmp_path / "slow", tmp_path) as service:
        with load(service.proxy.url, CLIENTS) as result:
            killed = signal_one(service, signal.SIGKILL)
            assert killed.wait() == -signal.SIGKILL
            wait_until(lambda: service.states()[0] == "DOWN")
            killed.start()
            wait_until(lambda: service.states() == ["UP", "UP"])
        print(result)
        log = service.proxy.log.read_text()
    assert result.failed == {}
    assert "replicas/replica1 is DOWN" in log
    assert "/+1 " in log  # HAProxy sent a request to another replica


@pytest.mark.full_grid
def test_a_hung_replica_delays_only_its_own_requests_and_gets_no_more(models: Path, tmp_path: Path) -> None:
    """Its requests end with 504, 10 s after their deadline. All other requests are answered in the meantime."""
    with balanced(models, tmp_path) as service:
        with load(service.proxy.url, CLIENTS, headers={"x-request-timeout-ms": "1000"}) as result:
            hung = signal_one(service, signal.SIGSTOP)
            wait_until(lambda: service.states()[0] == "DOWN")
            wait_until(lambda: service.proxy.log.read_text().count(" sH-- ") > 0)
            assert service.states() == ["DOWN", "UP"]
            os.kill(hung.process.pid, signal.SIGCONT)
            wait_until(lambda: service.states() == ["UP", "UP"])
        print(result)
        timed_out = service.proxy.log.read_text().count(" sH-- ")
    assert 0 < timed_out <= CLIENTS
    assert set(result.failed) <= {504, 429}  # on a busy machine, a request can miss its deadline of 1 s
    assert result.outcomes[200] > CLIENTS

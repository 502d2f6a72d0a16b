"""Runs `bert-serve` processes on loopback ports, and HAProxy or nginx in front of several of them, which are replicas.

A replica can be restarted at its address. The proxies run with the configurations of `deploy/`, but with other addresses.
"""

import contextlib
import getpass
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from bertserve.service.errors import StartError
from support import ROOT

# Below the ports that Linux assigns (net.ipv4.ip_local_port_range, from 32768), and above the ports of Ray's workers (up to 19999).
# Ray Serve also uses the hundred ports after the chosen one.
PORTS = range(20_000, 32_000)
_STOP_S = 60
BERT_SERVE = "import sys; from bertserve.service.cli import main; sys.exit(main())"

DEPLOY = ROOT / "deploy"
HAPROXY_FILE, NGINX_FILE = DEPLOY / "haproxy/haproxy.cfg", DEPLOY / "nginx/nginx.conf"
_START_S = 10
_READY = 200
# Requests of an address per second, more than in deploy/: a load comes from one address, and stands for that of many.
MANY_REQUESTS = 10**6


class ServeProcess:
    """A `bert-serve serve` on a port of loopback, 0 for a free one. Its process can be restarted; all append their stderr to `log`.

    `program` is its Python code. `tree` is another checkout, whose code it runs.
    """

    def __init__(
        self, models: Path, port: int, log: Path, flags: Sequence[str] = (), *, program: str = BERT_SERVE, tree: Path | None = None
    ) -> None:
        self._env = None
        if tree is not None:
            if not (tree / "bertserve").exists():  # until November 2026, a checkout had no package `bertserve`
                program = program.replace("bertserve.", "")
            # without the current folder, which would come first, and can be this checkout
            self._env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        self._command = [sys.executable, "-c", program, "serve", "--models", str(models), "--port", str(port), *flags]
        self.port = port
        self.log = log
        self.url = ""
        self.process: subprocess.Popen[str]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.rpartition("/")[2].partition(":")
        return host, int(port)

    def lines(self) -> list[str]:
        """Returns the lines of the log without the lines of a normal shutdown."""
        return without_shutdown(self.log.read_text())

    def memory_mib(self) -> float:
        """Returns the anonymous resident memory of the process in MiB. The kernel can drop and reread pages of files."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))

    def longest_probe_s(self, over: threading.Event, pause_s: float) -> float:
        """Returns the longest time until a probe was answered, in seconds; sends probes one after the other until the event is set."""
        longest = 0.0
        with contextlib.closing(HTTPConnection(*self.address, timeout=60)) as connection:
            while not over.is_set():
                start = time.perf_counter()
                connection.request("GET", "/health/live")
                answer = connection.getresponse()
                answer.read()
                assert answer.status == _READY
                longest = max(longest, time.perf_counter() - start)
                time.sleep(pause_s)
        return longest

    def start(self) -> None:
        """Starts a process, and returns once it listens."""
        self.spawn()
        self.wait_until_it_listens()

    def spawn(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._env)

    def wait_until_it_listens(self) -> None:
        """Waits until the process accepts connections. If it ends before that, the error is a StartError."""
        for line in self.process.stdout:
            if " listens on " in line:
                self.url = line.split(" listens on ")[1].split(",")[0]
                return
        self.wait()
        raise StartError(f"bert-serve did not start: {self.log.read_text()}")

    def stop(self) -> int:
        """Stops the process, waits until it has ended, and returns its exit code."""
        self.process.terminate()
        return self.wait()

    def wait(self) -> int:
        """Waits until the process has ended, and returns its exit code."""
        code = self.process.wait(_STOP_S)
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        """Kills the process, even if it hangs."""
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


def without_shutdown(log: str) -> list[str]:
    """Returns the lines of a log without the start and the end of a shutdown."""
    return [line for line in log.splitlines() if "shutdown started" not in line and "shutdown finished" not in line]


@contextmanager
def running(models: Path, log: Path, *flags: str, program: str = BERT_SERVE) -> Iterator[ServeProcess]:
    """Runs the real command on a free port until the block ends."""
    process = ServeProcess(models, 0, log, flags, program=program)
    try:
        process.start()
        yield process
    finally:
        process.stop()


@contextmanager
def replicas(models: Path, count: int, folder: Path, flags: Sequence[str] = ()) -> Iterator[list[ServeProcess]]:
    """Runs replicas of the same models on free ports until the block ends. They start in parallel, and write logs to a folder."""
    processes = [ServeProcess(models, port, folder / f"replica-{port}.log", flags) for port in free_ports(count)]
    with ExitStack() as stack:
        for process in processes:
            process.spawn()
            stack.callback(process.kill)
        for process in processes:
            process.wait_until_it_listens()
        yield processes


def free_ports(count: int) -> list[int]:
    """Returns distinct free ports on loopback, below the ports that the system assigns, so that no other process gets them before a server."""
    with ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(PORTS, len(PORTS)):
            if len(ports) == count:
                break
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
        return ports


@dataclass(frozen=True)
class Proxy:
    """A running proxy. Its log has failures and state changes of replicas."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class HAProxy(Proxy):
    """A running HAProxy, with the address of its status page."""

    stats_url: str


def haproxy_configuration(stats_port: int, replica_ports: Sequence[int], rate: int) -> str:
    """Returns the configuration of `deploy/haproxy` with these ports, one server per replica, and another limit of requests."""
    text = HAPROXY_FILE.read_text(encoding="utf-8").replace("bind 127.0.0.1:8404", f"bind 127.0.0.1:{stats_port}")
    text = text.replace("sc0_http_req_rate gt 1000", f"sc0_http_req_rate gt {rate}")
    lines = "".join(f"    server replica{i} 127.0.0.1:{replica_port}\n" for i, replica_port in enumerate(replica_ports, 1))
    return re.sub(r"(^ +server replica\d+ \S+\n)+", lines, text, flags=re.MULTILINE)


def nginx_configuration(port: int, replica_ports: Sequence[int], folder: Path, rate: int) -> str:
    """Returns the configuration of `deploy/nginx` with these ports, another limit of requests, and temporary files in a folder."""
    text = NGINX_FILE.read_text(encoding="utf-8").replace("listen 127.0.0.1:8000", f"listen 127.0.0.1:{port}")
    text = text.replace("rate=1000r/s", f"rate={rate}r/s").replace("burst=1000", f"burst={rate}")
    text = text.replace("user www-data;", f"user {getpass.getuser()};\npid {folder}/pid;")
    paths = "".join(f"    {name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "scgi", "uwsgi"))
    [options] = set(re.findall(r"^ +server 127\.0\.0\.1:\d+( .*)$", text, re.MULTILINE))
    lines = "".join(f"        server 127.0.0.1:{replica_port}{options}\n" for replica_port in replica_ports)
    return re.sub(r"(^ +server 127\S+ .*\n)+", lines, text, flags=re.MULTILINE).replace("http {\n", f"http {{\n{paths}", 1)


@contextmanager
def haproxy(replica_ports: Sequence[int], folder: Path, rate: int = MANY_REQUESTS) -> Iterator[HAProxy]:
    """Runs HAProxy in front of running replicas until the block ends. Its files are in the folder."""
    port, stats_port = free_ports(2)
    file = folder / f"haproxy-{port}.cfg"
    file.write_text(haproxy_configuration(stats_port, replica_ports, rate), encoding="utf-8")
    with _proxy(["haproxy", "-db", "-f", str(file)], port, folder, {"BIND": f"127.0.0.1:{port}"}) as proxy:
        yield HAProxy(proxy.url, proxy.process, proxy.log, f"http://127.0.0.1:{stats_port}")


@contextmanager
def nginx(replica_ports: Sequence[int], folder: Path, rate: int = MANY_REQUESTS) -> Iterator[Proxy]:
    """Runs nginx in front of running replicas until the block ends. Its files are in the folder."""
    [port] = free_ports(1)
    files = folder / f"nginx-{port}"
    files.mkdir()
    file = files / "nginx.conf"
    file.write_text(nginx_configuration(port, replica_ports, files, rate), encoding="utf-8")
    with _proxy(["nginx", "-p", str(files), "-c", str(file), "-g", "daemon off;"], port, folder) as proxy:
        yield proxy


PROXIES = {"haproxy": haproxy, "nginx": nginx}


@contextmanager
def _proxy(command: list[str], port: int, folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Proxy]:
    """Runs a proxy until the block ends. It is started when a replica is ready through it."""
    [program, *_] = command
    log = folder / f"{program}-{port}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env={**os.environ, **(environment or {})})
    try:
        proxy = Proxy(f"http://127.0.0.1:{port}", process, log)
        end = time.monotonic() + _START_S
        while not is_ready(proxy.url):
            if process.poll() is not None or time.monotonic() > end:
                raise StartError(f"{program} did not start: {log.read_text()}")
            time.sleep(0.02)
        yield proxy
    finally:
        process.terminate()  # both end at once, without waiting for connections
        process.wait()


def is_ready(url: str, path: str = "/health/ready") -> bool:
    """Returns whether a service or a balancer answers a probe with 200."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=5)
    with contextlib.closing(connection), contextlib.suppress(OSError, HTTPException):
        connection.request("GET", path)
        return connection.getresponse().status == _READY
    return False

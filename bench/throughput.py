"""A first figure: requests per second of a running service, next to a bare onnxruntime loop, in turn in one run.

    bert-serve serve --models models &
    python -m bench.throughput --bundle models/sentiment

Closed loop: a fixed number of keep-alive connections, each sending its next text when the last one was answered. The bare
loop runs the same texts, tokenized beforehand, one by one on two threads over one session with one thread each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from service import bundle
from service.engine import OnnxEngine
from service.tokenization import Encoding, Tokenizer

SHORT = (
    "A warm, funny and thoroughly engaging film with a cast that clearly enjoys every minute of it.",
    "The plot makes little sense and the jokes wear thin long before the end arrives, I am afraid.",
    "Beautifully shot and quietly moving, it asks for patience and rewards it many times over, truly.",
    "An overlong, noisy and oddly joyless sequel that nobody asked for and few will remember next year.",
)


async def served(url: str, bodies: list[bytes], connections: int, seconds: float) -> float:
    """Returns answered requests per second over keep-alive connections.

    Raises:
        RuntimeError: An answer was not 200.
    """
    parts = urlsplit(url)
    requests = [
        b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n%s" % (parts.path.encode(), parts.netloc.encode(), len(body), body)
        for body in bodies
    ]
    end = time.perf_counter() + seconds
    counts = await asyncio.gather(*(_connection(parts.hostname or "", parts.port or 80, requests, i, end) for i in range(connections)))
    return sum(counts) / seconds


async def _connection(host: str, port: int, requests: list[bytes], first: int, end: float) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    count = 0
    for request in itertools.cycle(requests[first % len(requests) :] + requests[: first % len(requests)]):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the service answered {head.splitlines()[0].decode()}")
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        if time.perf_counter() > end:
            break
        count += 1
    writer.close()
    return count


def bare(engine: OnnxEngine, encodings: list[Encoding], threads: int, seconds: float) -> float:
    """Returns runs per second of a plain loop on each of `threads` threads over one session."""
    end = time.perf_counter() + seconds
    counts = [0] * threads

    def loop(i: int) -> None:
        for encoding in itertools.cycle(encodings):
            engine.run([encoding])
            if time.perf_counter() > end:
                return
            counts[i] += 1

    workers = [threading.Thread(target=loop, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / seconds


def main() -> None:
    """Runs the rounds and prints a line each, then the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/classify")
    parser.add_argument("--bundle", type=Path, default=Path("models/sentiment"))
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    loaded = bundle.load(args.bundle)
    graph = loaded.graph("cpu")
    spec = loaded.manifest.tokenizer
    tokenizer = Tokenizer(loaded.tokenizer_path, spec)
    engine = OnnxEngine(loaded.path / graph.file, graph, pad_id=spec.pad_id, padding_side=spec.padding_side)
    encodings = [tokenizer.assemble(tokens.ids) for tokens in tokenizer.tokenize(SHORT)]
    bodies = [json.dumps({"inputs": text}).encode() for text in SHORT]
    out = sys.stdout.write
    out(f"{statistics.mean(map(len, encodings)):.0f} tokens a text, {args.connections} connections, {graph.file}\n")
    rounds = []
    for i in range(args.rounds):
        a = asyncio.run(served(args.url, bodies, args.connections, args.seconds))
        b = bare(engine, encodings, args.threads, args.seconds)
        rounds.append((a, b))
        out(f"round {i + 1}: served {a:.0f}/s, bare {b:.0f}/s, ratio {a / b:.2f}\n")
    a, b, ratio = (statistics.median(values) for values in zip(*((a, b, a / b) for a, b in rounds), strict=True))
    out(f"median:  served {a:.0f}/s, bare {b:.0f}/s, ratio {ratio:.2f}\n")


if __name__ == "__main__":
    main()

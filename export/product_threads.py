"""How many threads a product of matrices takes, of torch and of numpy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def one_thread_a_product() -> Iterator[None]:
    """Lets torch and numpy take one thread: each core works on something of its own, and two that share their threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1, "blas"):
            yield
    finally:
        torch.set_num_threads(threads)

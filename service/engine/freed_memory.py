"""Returns freed memory to the system: glibc keeps tens of megabytes of freed blocks in the heaps of threads that tokenize and run."""

import ctypes
import threading
import time

# The next runs must get the memory again, page by page. With 1 s, this took 2 to 4 % of the processor time of long texts on a busy machine
# (bench/results/2026-11-29-freed-memory.md).
TRIM_INTERVAL_S = 10.0
WORK_S = 0.5  # seconds of processor time that make a trim worth it; an idle service needs about 0.002 s per second


def return_freed_memory(stopped: threading.Event, *, interval_s: float = TRIM_INTERVAL_S, work_s: float = WORK_S) -> None:
    """Calls glibc's `malloc_trim` after each interval in which the process has worked, until `stopped`. Other C libraries lack it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    trimmed_at_s = time.process_time()
    while trim is not None and not stopped.wait(interval_s):
        if time.process_time() - trimmed_at_s > work_s:
            trim(0)
            trimmed_at_s = time.process_time()

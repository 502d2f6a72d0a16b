"""Counts the service's own function calls for one `/classify` request, from its bytes to the bytes of the response: `make calls`.

The request arrives through LimitedProtocol on a socket, and runs on an inference thread. A coroutine counts once, even if it resumes.
Comprehensions, libraries and generated code do not count.
"""

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop

from bertserve.service.api.application import Application
from bertserve.service.build import build
from bertserve.service.settings import Settings
from support.served_socket import client, listening

ROOT = Path(__file__).parents[1]
SERVICE = str(ROOT / "bertserve/service")
WARM_UP = 3  # requests before the counted request
BODY = b'{"inputs": "A warm, funny and thoroughly engaging film."}'
REQUEST = b"POST /classify HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)


def count_calls(models: Path) -> list[tuple[str, bool]]:
    """Returns the calls of one request to a warmed-up service with these models.

    Each is the function as `file:line name`, and whether it ran on the thread of the event loop.
    """
    calls: dict[FrameType, tuple[str, bool]] = {}  # one frame per call; the identity of a kept frame is not reused
    counting = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not counting or event != "call" or not code.co_filename.startswith(SERVICE):
            return
        if code.co_name not in ("<listcomp>", "<genexpr>") and frame not in calls:
            function = f"{code.co_filename.removeprefix(f'{SERVICE}/')}:{code.co_firstlineno} {code.co_qualname}"
            calls[frame] = function, threading.current_thread() is threading.main_thread()

    async def run() -> None:
        nonlocal counting
        settings = Settings(models=(models,), allow_implicit_default=True)
        state = build(settings)
        threading.setprofile(note)  # counts in threads that start later
        state.scheduler.start()
        async with listening(Application(state)) as server, client(server) as (reader, writer):
            for i in range(WARM_UP + 1):
                counting = i == WARM_UP
                sys.setprofile(note)
                writer.write(REQUEST)
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200"), head
                await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
                await asyncio.sleep(0.05)  # time for the work after the response, such as metrics
            counting = False
        sys.setprofile(None)
        threading.setprofile(None)
        await state.scheduler.stop(5)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(run(), 20))
    return list(calls.values())


def main() -> None:
    calls = count_calls(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "models")
    for thread, is_loop in (("event loop", True), ("inference thread", False)):
        functions = [function for function, on_loop in calls if on_loop is is_loop]
        print(f"{thread}: {len(functions)} calls", *functions, "", sep="\n")
    different = {function for function, _ in calls}
    print(f"{len(calls)} calls of {len(different)} functions in {len({function.partition(':')[0] for function in different})} files")


if __name__ == "__main__":
    main()

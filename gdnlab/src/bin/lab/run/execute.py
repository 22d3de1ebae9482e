"""Runs code cells in one Jupyter kernel, as the program at the other end of the pipe asks.

Requests and replies are JSON, one a line. The first request opens the kernel:
    {"kernel": name, "folder": path, "log": path, "cell_timeout_s": s, "start_timeout_s": s}
Each further one runs a cell, {"source": text}, and is answered with
    {"outputs": [...], "seconds": s, "problem": null | text}
At the end of the input the kernel is shut down.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import time

from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import v4

# The kernel and its children inherit standard output: keep the replies apart from what they print.
replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
logging.disable(logging.CRITICAL)


def reply(**fields):
    replies.write(json.dumps(fields) + "\n")
    replies.flush()


async def run_cell(client, source):
    cell = v4.new_code_cell(source)
    client.nb.cells.append(cell)
    start = time.monotonic()
    problem = None
    try:
        await client.async_execute_cell(cell, len(client.nb.cells) - 1)
    except CellTimeoutError:
        problem = f"took longer than {client.timeout} s, the limit for one cell"
    except DeadKernelError:
        problem = "the kernel died"
    reply(outputs=cell.outputs, seconds=time.monotonic() - start, problem=problem)


async def serve(request_lines):
    settings = json.loads(await request_lines.readline())
    client = NotebookClient(
        v4.new_notebook(),
        kernel_name=settings["kernel"],
        timeout=settings["cell_timeout_s"],
        startup_timeout=settings["start_timeout_s"],
        allow_errors=True,
        coalesce_streams=True,
        record_timing=False,
    )
    start = time.monotonic()
    with open(settings["log"], "w", encoding="utf-8") as log:
        try:
            async with client.async_setup_kernel(cwd=settings["folder"], stdout=log, stderr=log):
                reply(outputs=[], seconds=time.monotonic() - start, problem=None)
                while line := await request_lines.readline():
                    await run_cell(client, json.loads(line)["source"])
        except (RuntimeError, OSError) as error:
            reply(outputs=[], seconds=time.monotonic() - start, problem=str(error))


async def main():
    loop = asyncio.get_running_loop()
    request_lines = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(request_lines), sys.stdin)
    work = asyncio.ensure_future(serve(request_lines))
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(stop, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        sys.exit(130)


asyncio.run(main())

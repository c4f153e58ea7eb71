"""Ends this process as one that failed, where no exception can."""

import contextlib
import logging
import os
import sys


def end_process(said: str) -> None:
    """Write a message to stderr and end the process at once, with exit code 1.

    Nothing that is registered for the exit runs any more, but what is written is flushed.
    """
    print(said, file=sys.stderr)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)

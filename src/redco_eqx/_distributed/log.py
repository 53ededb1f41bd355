"""What a process says and writes before it ends."""

import contextlib
import gc
import io
import logging
import sys


def log(message: str) -> None:
    """A line on standard error, from whichever process."""
    with contextlib.suppress(OSError, ValueError):  # closed
        print(f"redco_eqx: {message}", file=sys.stderr, flush=True)


def flush_all() -> None:
    """Flushes the handlers of `logging` and every open file, as `os._exit` does not.

    Python keeps no list of open files, so all objects are looked through. The thread that holds a file may be
    stuck, which is why nobody can be asked to flush his own.
    """
    with contextlib.suppress(Exception):
        logging.shutdown()
    # By type, as an object can do anything when asked for its class; and `io.IOBase` itself is slow to ask.
    base = io.IOBase.__mro__[1]
    for file in [thing for thing in gc.get_objects() if issubclass(type(thing), base)]:
        with contextlib.suppress(Exception):
            if not file.closed:
                file.flush()

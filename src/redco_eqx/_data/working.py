"""The work in hand: what each thread that makes batches is doing, so that what hangs can be named."""

import contextlib
import threading
import time
from collections.abc import Iterator

_in_hand: dict[int, list[tuple[float, str]]] = {}


@contextlib.contextmanager
def working(what: str, note: str | None = None) -> Iterator[None]:
    """Says what this thread does inside, within what it has said before. An error gets the note."""
    mine = _in_hand.setdefault(threading.get_ident(), [])
    mine.append((time.monotonic(), what))
    try:
        yield
    except Exception as error:
        if note is not None:
            error.add_note(note)
        raise
    finally:
        mine.pop()
        if not mine:
            del _in_hand[threading.get_ident()]


def work_in_hand() -> str:
    """A line for each thread that is at work: at what, for how long, and its name. The slowest comes first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for ident, mine in list(_in_hand.items()):
        doing = list(mine)
        if doing and ident in names:
            since = time.monotonic() - doing[-1][0]
            what = ", ".join(what for _, what in doing)
            found.append((-since, f"{what}: not back for {since:.0f} s, in the thread {names[ident]}"))
    return "\n".join(line for _, line in sorted(found))

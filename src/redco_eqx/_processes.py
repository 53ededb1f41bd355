"""What processes must agree on: facts that the first one knows, and failures that not all have seen."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def on_first(act: Callable[[], None]) -> None:
    """`act()` on process 0; an `OSError` there is raised on all."""
    problem = ""
    if jax.process_index() == 0:
        try:
            act()
        except OSError as error:
            if jax.process_count() == 1:
                raise
            problem = str(error)
    problem = from_first(lambda: problem)
    if problem:
        raise OSError(f"on process 0: {problem}")


def from_first(make: Callable[[], Any]) -> Any:
    """What `make()` gives on process 0, on all of them; it must be plain JSON."""
    if jax.process_count() == 1:
        return make()
    text = json.dumps(make()).encode() if jax.process_index() == 0 else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    data = np.frombuffer(text.ljust(size), np.uint8) if text else np.zeros(size, np.uint8)
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(data), np.uint8)))


def together(load: Callable[[], Any], failure: type[Exception]) -> Any:
    """`load()`, which raises `failure` on every process if it does so on one."""
    result, problem = None, None
    try:
        result = load()
    except failure as error:
        problem = error
    if jax.process_count() > 1:
        failed = multihost_utils.process_allgather(np.asarray(problem is not None))
        if problem is None and np.any(failed):
            problem = failure(f"this failed on the processes {np.flatnonzero(failed).tolist()}")
    if problem is not None:
        raise problem
    return result

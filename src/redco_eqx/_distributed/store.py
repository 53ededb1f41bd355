"""The key-value store that the processes of one run share, and who they are.

It is that of JAX's coordination service, which process 0 holds. Any thread may use it: nothing here is
a collective, and nothing waits for another process unless it says so.
"""

import json
import os
import socket

import jax

from redco_eqx._distributed.jax_internals import coordination_client

_PREFIX = "redco_eqx"


def put(key: str, value: str) -> None:
    """Sets or replaces the value of a key."""
    coordination_client().key_value_set(f"{_PREFIX}/{key}", value, allow_overwrite=True)


def get(key: str) -> str | None:
    """The value of a key, `None` if it has none."""
    try:
        return coordination_client().key_value_try_get(f"{_PREFIX}/{key}")
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def wait(key: str, seconds: float) -> str:
    """The value of a key, as soon as it has one. Raises `jax.errors.JaxRuntimeError` after `seconds`."""
    return coordination_client().blocking_key_value_get(f"{_PREFIX}/{key}", round(1000 * seconds))


def delete(key: str) -> None:
    """Removes a key."""
    coordination_client().key_value_delete(f"{_PREFIX}/{key}")


def entries(directory: str) -> dict[str, str]:
    """All keys below a directory, named relative to it, with their values."""
    start = len(f"{_PREFIX}/{directory}/")
    return {
        key[start:]: value for key, value in coordination_client().key_value_dir_get(f"{_PREFIX}/{directory}")
    }


def introduce(process: int) -> None:
    """Tells the others where this process runs."""
    put(f"process/{process}", json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))


def name_of(process: int) -> str:
    """`process 1 (host b, pid 77)`; the number alone where nothing more is known."""
    try:
        value = get(f"process/{process}")
        where = json.loads(value) if value else {}
    except (jax.errors.JaxRuntimeError, AttributeError):  # the service, or its client, is gone
        where = {}
    return f"process {process} (host {where['host']}, pid {where['pid']})" if where else f"process {process}"

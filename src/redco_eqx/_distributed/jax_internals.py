"""Names that JAX keeps private, imported where they are used: only programs of many processes need them."""

from typing import Any


def coordination_client() -> Any:
    """The client of JAX's coordination service, `None` where JAX has not joined others, or has left them."""
    from jax._src import distributed

    return distributed.global_state.client


def has_devices() -> bool:
    """True if JAX has looked for devices already, after which it cannot join other processes."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def detect_launch(
    address: str | None, num_processes: int | None, process_id: int | None, timeout_seconds: int
) -> tuple[str | None, int | None, int | None, int | None]:
    """Fills in what JAX detects of a launcher. The last one is the number of the process on its node.

    `jax.distributed.initialize` would do the same, but there is no way to look before it leaps.
    """
    from jax._src.clusters import ClusterEnv

    # The last argument but two is for devices: JAX's choice of them is not always good.
    found = ClusterEnv.auto_detect_unset_distributed_params(
        address, num_processes, process_id, None, None, timeout_seconds
    )
    return *found[:3], None if found[3] is None else next(iter(found[3]))

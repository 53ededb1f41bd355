"""What a compiled step takes of a device, and sends: in bytes, and in a line."""

import jax
from jax.sharding import Mesh

from redco_eqx._compiled.communication import communication
from redco_eqx._tree import size_text


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """The most that a program has in the memory of a device at any time, its arguments included.

    The TPU compiler says it. Of others it is the sum of arguments, results that are not written over arguments,
    and temporaries, which is no less.
    """
    stats = compiled.memory_analysis()
    assert stats is not None  # there is one for CPU, GPU and TPU
    platform = next(iter(jax.tree.leaves(compiled.input_shardings)), None)
    is_tpu = platform is not None and next(iter(platform.device_set)).platform == "tpu"
    if is_tpu and stats.peak_memory_in_bytes:
        return stats.peak_memory_in_bytes
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + results + stats.temp_size_in_bytes


def cost(compiled: jax.stages.Compiled, mesh: Mesh) -> str:
    """`a step takes 1.5 MiB of each device, 0.9 MiB of it while it runs, and sends 256.0 KiB over data`."""
    stats = compiled.memory_analysis()
    assert stats is not None
    peak = peak_bytes(compiled)
    running = peak - stats.argument_size_in_bytes
    line = (
        f"a step takes {size_text(peak)} of each device, {size_text(running)} of it while it runs, and sends "
    )
    try:
        found = communication(compiled, mesh).by_axes
    except ValueError:  # a form of the text that is not known here
        return line.removesuffix(", and sends ")
    sent = [f"{size_text(total.sent_bytes)} over {' and '.join(axes)}" for axes, total in found.items()]
    return line + (", ".join(sent) or "nothing")

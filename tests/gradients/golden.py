"""Programs whose gradients, or whose compilation, were wrong when they were found."""

from typing import Any

from gradients.programs import MESHES, Spec

PLAIN: Spec = dict.fromkeys(("stride", "spread", "dilation"), 1)
GEOMETRY: Spec = {"size": 3, "padding": "same", "channels_first": False, **PLAIN}
DEPTHWISE: Spec = {
    "name": "convolution",
    "groups": "depthwise",
    "width": 1,
    "bias": False,
    **GEOMETRY,
}
ONE: Spec = {"groups": 1, "width": 1}
PER_EXAMPLE: Spec = {
    "name": "per_example_convolution",
    "shots": 1,
    "given": False,
    **ONE,
    **GEOMETRY,
}
SEPARABLE: Spec = {
    "name": "separable_convolution",
    "width": 1,
    "multiplier": 1,
    **GEOMETRY,
}
GROUPED: Spec = {
    "name": "convolution",
    "groups": 2,
    "width": 8,
    "bias": False,
    **GEOMETRY,
}
LOOKUP: Spec = {
    "name": "embedding",
    "size": 16,
    "scaled": False,
    "axis": 0,
    "mode": "fill",
    "beyond": True,
}
STACKED: Spec = {
    "name": "stacked_convolutions",
    "layers": 2,
    "size": 3,
    "groups": "depthwise",
}
FFT: Spec = {"name": "fft", "axis": 2, "how": "imag"}
COMPLEX: Spec = {"name": "complex_linear", "width": 8, "how": "abs"}
ADAPTED: Spec = {"name": "adapted_convolution", "rate": 0.1, "size": 3, **ONE}


IN_TWO = {**ADAPTED, "groups": 2}
POINTWISE = {**ADAPTED, "size": 1}
BY_ONE = {**PER_EXAMPLE, "size": 1}
INNER: Spec = {"objective": "inner_step"}

TWO, FSDP = [["data2xtensor4", "whole"], ["2x2x2", "whole"]], [["fsdp8", "whole"]]


def program(*operations: Spec, **other: Any) -> Spec:
    """On two meshes, with all parameters whole."""
    return {
        "batch": 8,
        "spatial": [8],
        "channels": 8,
        "objective": "loss",
        "mode": "step",
        "num_microbatches": 1,
        "reshard_after_forward": True,
        "layouts": TWO,
        "operations": [{"wrapper": "none", **operation} for operation in operations],
    } | other


# Each on meshes and layouts where it is wrong without the workaround in the library.
GOLDEN: dict[str, Spec] = {
    # XLA sums the gradient of a grouped convolution over axes that do not split the
    # batch.
    "depthwise": program(DEPTHWISE, layouts=[[mesh, "whole"] for mesh in MESHES]),
    "depthwise in 2-D, by the rules": program(
        {**DEPTHWISE, "channels_first": True},
        spatial=[4, 4],
        layouts=[[mesh, "rules"] for mesh, _ in TWO],
    ),
    "depthwise, two tasks": program({**DEPTHWISE, "wrapper": "tasks"}, batch=16),
    "depthwise, ensemble of states": program(DEPTHWISE, mode="ensemble"),
    "depthwise, accumulated": program(
        {**DEPTHWISE, "wrapper": "checkpoint"}, batch=16, num_microbatches=2
    ),
    # `vmap` over data shards makes groups of them in a weight gradient.
    "convolution, reduced once": program(
        {**DEPTHWISE, "groups": 1, "width": 8}, batch=16, mode="reduce_once"
    ),
    "depthwise, reduced once": program(
        DEPTHWISE, batch=16, num_microbatches=2, mode="reduce_once"
    ),
    "depthwise, derivative of a step": program(DEPTHWISE, mode="outer"),
    "depthwise, inner step": program(DEPTHWISE, **INNER),
    "depthwise in a scan": program(STACKED),
    # Gradients of each example: values were wrong on meshes whose every axis splits the
    # batch.
    "adapted convolution in 2-D": program(
        ADAPTED, spatial=[4, 4], batch=16, layouts=FSDP
    ),
    "adapted grouped convolution": program(IN_TWO, mode="outer", layouts=TWO[:1]),
    # Pointwise kernels that differ by example: wrong values, an error or a crash of the
    # partitioner.
    "pointwise by example": program(BY_ONE),
    "grouped pointwise by example": program(
        {**BY_ONE, "groups": 2, "width": 2}, batch=16
    ),
    "depthwise pointwise by example": program(
        {**BY_ONE, "groups": "depthwise"}, batch=16, layouts=TWO[1:]
    ),
    "pointwise adapted by example": program(
        {**POINTWISE, "groups": 2, "width": 8}, batch=16, layouts=FSDP
    ),
    # Fourier transforms over a split dim: a crash over the batch, an error over
    # channels.
    "fft over the batch": program(
        {"name": "fft", "axis": 0, "how": "real"}, batch=16, layouts=FSDP
    ),
    "fft over split channels": program(FFT, layouts=[["data2xtensor4", 32]]),
    # Kernels of grouped convolutions that are split: a crash, an error or wrong second
    # derivatives.
    "depthwise kernel split, inner step": program(
        SEPARABLE, **INNER, layouts=[["data2xtensor4", 2]]
    ),
    "adapted grouped kernel split, inner step": program(
        IN_TWO, **INNER, layouts=[["2x2x2", 82]]
    ),
    # A kernel that is split along its window: second derivatives.
    "kernel split along its window, inner step": program(
        {**SEPARABLE, "size": 2},
        spatial=[8, 6],
        **INNER,
        layouts=[["fsdp2xtensor4", 17]],
    ),
    # Gathers the batch, where XLA splits it (openxla/xla#47945): the bytes are counted.
    "grouped": program(GROUPED, batch=64, collectives=True),
    # The gradient of jnp.take reaches rows that were not read (openxla/xla#42481): seen
    # of Explicit axes only.
    "rows of a split table": program(
        LOOKUP, layouts=[["2x2x2", 14], ["fsdp2xtensor4", 6]]
    ),
    # jax.checkpoint has no reduce_precision of complex numbers.
    "complex parameters": program(COMPLEX, layouts=[["fsdp2xtensor4", 17]]),
}

"""`largest`: the largest size of something that fits."""

import itertools
from collections.abc import Callable, Sequence

from redco_eqx._planning.report import MeshPlan


def largest(sizes: Sequence[int], make_plan: Callable[[int], MeshPlan]) -> tuple[int, MeshPlan] | None:
    """The largest of some sizes whose plan fits, by bisection: the plans of a few are made.

    ```python
    def of_batch(size):
        batch = jax.ShapeDtypeStruct((size, 1025), jnp.int32)
        return rx.plan(make_model, loss_fn=loss_fn, optimizer=optimizer, batch=batch, target="v5e:4x4")

    size, found = rx.largest([8, 16, 32, 64, 128], of_batch)
    ```

    **Arguments:**

    - `sizes`: ascending: of a batch, of sequences, of a number of layers.
    - `make_plan`: the plan for a size. If one fits, so do all smaller ones: fix the mesh, or let each choose.

    **Returns:**

    The size and its plan; `None` if not even the first fits.

    **Raises:**

    `ValueError` if there are no sizes, or they do not ascend; and what `make_plan` raises.
    """
    if not sizes or any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ValueError(f"largest: sizes must be ascending numbers, but are {list(sizes)}.")
    found = None
    low, high = 0, len(sizes)  # what is below `low` fits, what is from `high` on does not
    while low < high:
        middle = (low + high) // 2
        made = make_plan(sizes[middle])
        if made.fits:
            found, low = (sizes[middle], made), middle + 1
        else:
            high = middle
    return found

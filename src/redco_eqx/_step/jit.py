"""`jit_step`: a compiled step for a loop of one's own, that refuses a state which was given away."""

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

from redco_eqx._parallel.linear import traced_mesh
from redco_eqx._sharding.mesh import context_of
from redco_eqx._step.mends import partitioned
from redco_eqx._step.state import TrainState, check_alive, check_is_state

R = TypeVar("R")


class JittedStep(Generic[R]):
    """The result of `jit_step`: call it as the step, or look at the program by `lower(state, batch)`."""

    def __init__(self, step: Callable[..., R], *, donate: bool):
        self._jitted = jax.jit(on_its_mesh(step), donate_argnums=0 if donate else ())

    def __call__(self, state: TrainState, *arguments: Any, **named: Any) -> R:
        check_is_state(state, "the first argument of a step")
        check_alive(state)  # jaxlib 0.10.2 and 0.11.0 end the process, 0.11.2 raises: openxla/xla#22604
        with context_of(state):
            return self._jitted(state, *arguments, **named)

    def lower(self, state: TrainState, *arguments: Any, **named: Any) -> jax.stages.Lowered:
        """`jax.jit(step).lower(...)`; the arguments may be abstract."""
        with context_of(state):
            return self._jitted.lower(state, *arguments, **named)


def jit_step(step: Callable[..., R], *, donate: bool = True) -> JittedStep[R]:
    """`jax.jit(step, donate_argnums=0)` for a function of a state and a batch, and two checks.

    A state that was donated before is refused by name; some versions of JAX end the process instead. And the
    gradients of a step of your own are right on every mesh, as those of `train_step` are: XLA's partitioner
    takes those of grouped convolutions for too large where a batch is split over some of the mesh axes only.

    ```python
    step = rx.jit_step(partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer, shardings=shardings))
    state, metrics = step(state, batch)       # the state that was given is used up
    ```

    **Arguments:**

    - `step`: `(state, batch) -> ...`, such as `functools.partial(train_step, ...)`; pure. More arrays than
        these are passed on, by position or by name (the `index` of `predict_step`, say).
    - `donate`: whether the step takes over the memory of the state, which is deleted. `False` for a step that
        returns no state, such as `eval_step`.

    **Returns:**

    The compiled step, which also has `lower(state, batch)`.

    **Raises:**

    `ValueError` on a call with a state that has been deleted.
    """
    return JittedStep(step, donate=donate)


def on_its_mesh(step: Callable[..., R]) -> Callable[..., R]:
    """`step`, made right for the mesh that its arguments lie on (see `partitioned`)."""

    @functools.wraps(step, assigned=("__doc__",))
    def run(*arguments: Any, **named: Any) -> R:
        def call(arguments: tuple[Any, ...], named: dict[str, Any]) -> R:
            return step(*arguments, **named)

        return partitioned(call, traced_mesh(arguments))(arguments, named)

    return run

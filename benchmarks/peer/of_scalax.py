"""scalax 0.2.6: its automatic rule, which is FSDP, on eight devices."""

import comparison
import flax_models
import jax
import optax
from flax.training.train_state import TrainState  # type: ignore[import-not-found]
from scalax.sharding import FSDPShardingRule, MeshShardingHelper  # type: ignore[import-not-found]


def one(name: str) -> None:
    model, loss, batch = flax_models.make(name)
    mesh = MeshShardingHelper([8], ["fsdp"])
    # What is small is whole, as ours.
    rule = FSDPShardingRule(fsdp_axis_size=8, min_fsdp_size=2**14)

    optimizer = optax.adamw(comparison.LEARNING_RATE)

    def make_state(params):
        return TrainState.create(apply_fn=None, params=params, tx=optimizer)

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        return state.apply_gradients(grads=grads), {
            "loss": value,
            "grad_norm": optax.global_norm(grads),
        }

    state = mesh.sjit(make_state, out_shardings=rule)(model.params)
    layouts = jax.tree.map(lambda x: x.sharding, state)
    rows = jax.NamedSharding(mesh.mesh, jax.P("fsdp"))
    jitted = jax.jit(
        step,
        in_shardings=(layouts, rows),
        out_shardings=(layouts, None),
        donate_argnums=0,
    )
    comparison.measure(
        "scalax 0.2.6",
        name,
        "fsdp 8",
        jitted,
        (state, batch),
        lambda output, given: (output[0], given[1]),
        lambda output: output[1]["loss"],
    )


if __name__ == "__main__":
    comparison.each("scalax 0.2.6", "fsdp 8", one)

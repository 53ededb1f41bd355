"""redco 0.4.23: its Trainer's own step, with the sharding rules that it makes."""

import comparison
import flax_models
import jax
import optax
import redco  # pyright: ignore[reportMissingImports]


def one(name: str) -> None:
    model, loss, batch = flax_models.make(name)
    deployer = redco.Deployer(jax_seed=0, n_model_shards=4, verbose=False)

    def loss_fn(rng, state, params, batch, is_training):
        return loss(params, batch)

    trainer = redco.Trainer(
        deployer=deployer,
        collate_fn=None,
        apply_fn=model,
        loss_fn=loss_fn,
        params=model.params,
        optimizer=optax.adamw(comparison.LEARNING_RATE),
        params_sharding_rules=deployer.get_sharding_rules(model.params),
    )
    # Its steps take a batch as (data, rows of each, ...).
    batch = jax.tree.map(
        lambda x: x.reshape(2, comparison.BATCH // 2, *x.shape[1:]), batch
    )
    trainer.setup_running_step(batch)
    with trainer.mesh:
        comparison.measure(
            "redco 0.4.23",
            name,
            "data 2 x tensor 4",
            trainer._p_train_step,
            (deployer.gen_model_step_rng(), trainer._state, batch),
            lambda output, given: (given[0], output[0], given[2]),
            lambda output: output[1]["loss"],
        )


if __name__ == "__main__":
    comparison.each("redco 0.4.23", "data 2 x tensor 4", one)

"""google-parallax 0.0.2: the layouts of its automatic strategy for our models, in our
step."""

import comparison
import equinox as eqx
import jax
import ours  # and with it the directory above
from layouts import Case, parallax

import redco_eqx as rx

PEER, MESH = "google-parallax 0.0.2", "data 2 x tensor 4"


def one(name: str) -> None:
    case = ours.case_of(name)
    model = eqx.filter_eval_shape(case.make_model, jax.random.key(0))
    specs = parallax(Case(name, model, case.loss_fn, case.batch))
    assert specs is not None, "it is not installed"
    ours.measure(
        PEER, name, MESH, rx.make_mesh(tensor=4), overrides=list(specs.items())
    )


if __name__ == "__main__":
    comparison.each(PEER, MESH, one)

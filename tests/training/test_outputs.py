"""`output_fn`: what a person reads, in what `predict` returns, in the file, and for `metric_fn`."""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import MESHES, collate, fit, linear_state, make_examples

import redco_eqx as rx

EXAMPLES = make_examples(11)


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return {"sum": jnp.sum(batch["x"], axis=1), "x": batch["x"]}


def words(example: Any, prediction: Any) -> str:
    """It has the example that belongs to the prediction, and arrays without the batch dim."""
    assert isinstance(prediction["sum"], np.ndarray | np.generic)
    np.testing.assert_array_equal(example["x"], prediction["x"])
    return f"{example['id']}: {'more' if prediction['sum'] > 0 else 'less'}"


EXPECTED = [f"{example['id']}: {'more' if example['x'].sum() > 0 else 'less'}" for example in EXAMPLES]


@pytest.mark.parametrize("mesh", MESHES)
def test_predict_returns_outputs_in_the_order_of_the_examples(mesh: str) -> None:
    state = linear_state(mesh=rx.make_mesh(**MESHES[mesh]))
    arguments: Any = {"collate_fn": collate, "predict_fn": predict_fn, "batch_size": 8}
    assert rx.predict(state, EXAMPLES, output_fn=words, **arguments) == EXPECTED
    assert len(rx.predict(state, EXAMPLES, **arguments)) == 11


def test_metrics_and_the_file_have_outputs(tmp_path: pathlib.Path) -> None:
    seen = []

    def metric_fn(examples: Any, outputs: Any) -> Any:
        seen.append(outputs)
        return {"more": np.mean([output.endswith("more") for output in outputs])}

    evaluation = rx.Evaluation(
        EXAMPLES,
        predict_fn=predict_fn,
        output_fn=words,
        metric_fn=metric_fn,
        predictions_directory=tmp_path,
    )
    fit(linear_state(), EXAMPLES, num_steps=1, evaluation=evaluation)
    assert seen == [EXPECTED[:4], EXPECTED]  # the rehearsal, and the end
    lines = (tmp_path / "step-1.jsonl").read_text().splitlines()
    assert [json.loads(line)["prediction"] for line in lines] == EXPECTED


def test_what_fails_says_for_which_example() -> None:
    def broken(example: Any, prediction: Any) -> Any:
        return {0: "zero", 1: "one"}[example["id"]]

    with pytest.raises(KeyError) as caught:
        rx.predict(
            linear_state(), EXAMPLES, collate_fn=collate, predict_fn=predict_fn, output_fn=broken, batch_size=4
        )
    assert "output_fn was given example 2" in "".join(caught.value.__notes__)


def test_it_needs_predictions() -> None:
    with pytest.raises(ValueError, match=r"output_fn needs predict_fn"):
        rx.Evaluation(EXAMPLES, output_fn=words)

"""Each example ends with one line that names what is wrong with its flags."""

import importlib

import pytest
from refusals import assert_ends_with_one_line

NOWHERE = "--data /nowhere"
# The line names what was passed.
QUOTED = {
    "classification_regression.main": (f"--task digits {NOWHERE}",),
    "differential_privacy.main": (
        "--delta 0.1",
        "--epsilon 0.0",
        "--clip -1.0",
        NOWHERE,
    ),
    "federated_learning.main": ("--clients-per-round 101", NOWHERE),
    "image_to_text.main": (NOWHERE, "--quick --model /nowhere"),
    "language_modeling.main": ("--quick --model /nowhere",),
    "lora.main": ("--quick --model /nowhere", f"--quick {NOWHERE}"),
    "meta_learning.main": (NOWHERE, "--ways 13", "--shots 100"),
    "preference_tuning.main": ("--quick --model /nowhere", NOWHERE),
    "reinforcement_learning.ppo": (
        "--env NoSuch-v1",
        "--num-envs 6",
        "--batch-size 100",
        "--steps 100",
    ),
    "reinforcement_learning.ddpg": ("--steps 1000",),
    "text_to_text.main": ("--quick --model /nowhere",),
}
REFUSED = [
    *(
        (name, x, "/nowhere" if "/nowhere" in x else x)
        for name, flags in QUOTED.items()
        for x in flags
    ),
    (
        "classification_regression.main",
        f"--task classification {NOWHERE}",
        "no train as .tsv, .csv, .jsonl",
    ),
    ("classification_regression.main", "--tensor 16", "needs a multiple of 16 devices"),
    ("classification_regression.main", "--task digits --batch-size 7", "batch_size=7"),
    (
        "classification_regression.main",
        "--batch-size 0",
        "--batch-size 0: it must be at least 1",
    ),
    ("differential_privacy.main", "--batch-size 5000", "1437"),
    ("federated_learning.main", "--clients 1000", "each client has 0 of 1437"),
    ("federated_learning.main", "--batch-size 20", "each client has 14 of 1437"),
    ("lora.main", "--quick --targets c_attn", "no projections named ['c_attn']"),
    (
        "reinforcement_learning.ppo",
        "--env Pendulum-v1",
        "--env Pendulum-v1: its actions are Box",
    ),
    (
        "reinforcement_learning.ppo",
        "--env FrozenLake-v1",
        "--env FrozenLake-v1: its observations are Discrete",
    ),
    (
        "reinforcement_learning.ddpg",
        "--env CartPole-v1",
        "--env CartPole-v1: its actions are Discrete",
    ),
    ("reinforcement_learning.ddpg", "--checkpoints somewhere", "--checkpoints"),
    (
        "reinforcement_learning.ddpg",
        "--batch-size 1024",
        "--batch-size 1024 --epochs 64",
    ),
    (
        "text_to_image.main",
        f"--model /nowhere {NOWHERE}",
        "--data /nowhere: it contains no picture",
    ),
    (
        "text_to_text.main",
        NOWHERE,
        "--data /nowhere: there is no train as .parquet, .jsonl, .csv in it",
    ),
]


@pytest.mark.parametrize(("program", "flags", "words"), REFUSED)
def test_bad_input_ends_with_one_line(program, flags, words):
    assert_ends_with_one_line(
        importlib.import_module(program).main, flags.split(), words
    )

"""Each example ends with one line that names what is wrong with its flags."""

import json

import pytest
from classification_regression import main as classification_regression
from differential_privacy import main as differential_privacy
from federated_learning import main as federated_learning
from glue import main as glue
from image_to_text import main as image_to_text
from language_modeling import main as language_modeling
from lora import main as lora
from meta_learning import main as meta_learning
from refusals import assert_ends_with_one_line
from reinforcement_learning import ddpg, ppo
from text_to_image import main as text_to_image
from text_to_text import main as text_to_text

from redco_eqx import models

NOWHERE = "--data /nowhere"
REFUSED = {
    classification_regression: [
        (f"--task digits {NOWHERE}", "/nowhere"),
        (f"--task classification {NOWHERE}", "no train as .tsv, .csv, .jsonl or .parquet"),
        ("--tensor 16", "needs 16 devices"),
        ("--tensor 0", "tensor=0"),
        ("--tensor 3", "fsdp * tensor = 3 must divide"),
        ("--devices -1", "--devices -1"),
        ("--task digits --batch-size 7", "batch_size=7"),
        ("--batch-size 0", "--batch-size 0: it must be at least 1"),
        ("--epochs -1", "--epochs -1: it must be at least 1"),
    ],
    differential_privacy: [
        ("--delta 0.1", "--delta 0.1"),
        ("--epsilon 0", "--epsilon 0.0"),
        ("--clip -1", "--clip -1.0"),
        ("--batch-size 5000", "1437"),
        (NOWHERE, "/nowhere"),
    ],
    federated_learning: [
        ("--clients-per-round 101", "--clients-per-round 101"),
        ("--clients 1000", "each client has 0 of 1437"),
        ("--batch-size 20", "each client has 14 of 1437"),
        (NOWHERE, "/nowhere"),
    ],
    image_to_text: [(NOWHERE, "/nowhere"), ("--quick --model /nowhere", "/nowhere")],
    language_modeling: [("--quick --model /nowhere", "/nowhere")],
    lora: [
        ("--quick --targets c_attn", "no projections named ['c_attn']"),
        ("--quick --model /nowhere", "/nowhere"),
        (f"--quick {NOWHERE}", "/nowhere"),
    ],
    meta_learning: [
        (NOWHERE, "/nowhere"),
        ("--ways 13", "--ways 13"),
        ("--shots 100", "--shots 100"),
    ],
    ppo: [
        ("--env Pendulum-v1", "--env Pendulum-v1: its actions are Box"),
        ("--env FrozenLake-v1", "--env FrozenLake-v1: its observations are Discrete"),
        ("--env NoSuch-v1", "--env NoSuch-v1"),
        ("--num-envs 6", "--num-envs 6"),
        ("--batch-size 100", "--batch-size 100"),
        ("--steps 100", "--steps 100"),
    ],
    ddpg: [
        ("--env CartPole-v1", "--env CartPole-v1: its actions are Discrete"),
        ("--steps 1000", "--steps 1000"),
        ("--batch-size 1024", "--batch-size 1024 --epochs 64"),
        ("--checkpoints somewhere", "--checkpoints"),
    ],
    text_to_image: [(f"--model /nowhere {NOWHERE}", "--data /nowhere: there is no picture in it")],
    text_to_text: [
        (NOWHERE, "--data /nowhere: there is no train as .parquet, .jsonl, .csv in it"),
        ("--quick --model /nowhere", "/nowhere"),
    ],
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_bad_input_ends_with_one_line(program):
    for flags, words in REFUSED[program]:
        assert_ends_with_one_line(program.main, flags.split(), words)


def test_a_model_of_another_kind_is_named(tmp_path):
    config = models.ViTConfig(image_size=8, patch_size=4, hidden_size=16, num_attention_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    (tmp_path / "train.jsonl").write_text('{"text": "ay", "label": "calm"}\n{"text": "no", "label": "wild"}\n')
    (tmp_path / "dev.jsonl").write_text('{"text": "ay", "label": "calm"}\n')
    flags = f"--quick --data {tmp_path} --task classification --text text --label label --model {tmp_path}"
    assert_ends_with_one_line(glue.main, flags.split(), "a vit has no classifier here, only bert and roberta")

"""Mistakes of a first hour with the models, and what the message of each must name.

Run as a program it makes them all, as `door.py` does those with the core.
"""

from typing import Any

import equinox as eqx
import numpy as np
from door import BATCH, KEY, STATE, tell

import redco_eqx_models

models: Any = redco_eqx_models  # no type checker warns of the mistakes
HEADS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
CONFIG = models.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, **HEADS)
# Without weights: wrong arguments are refused before anything reads them.
LM = eqx.filter_eval_shape(lambda key: models.LlamaForCausalLM(CONFIG, key=key), KEY)
TOKENS = np.ones((1, 2), np.int32)


def generate(inputs: Any, call: Any = models.generate, **more: Any) -> Any:
    return call(LM, inputs, max_new_tokens=2, **more)


# What is called, and what the message names, with `...` between. Of `TypeError`:
CONFUSED: list[tuple[Any, str]] = [
    (
        lambda: models.generate(STATE, BATCH["x"], max_new_tokens=2),
        "generate: model ... state.model",
    ),
    (lambda: generate("hello"), "inputs ... a str ... tokenizer("),
    (lambda: generate(["hello", "you"]), "inputs ... a list ... tokenizer("),
    (lambda: generate([[1, 2], [3, 4]]), "inputs ... a list ... np.array(ids)"),
    (lambda: generate([[1, 2], [3]]), "inputs ... a list ... padding"),
    (
        lambda: generate([[1]], models.beam_search, num_beams=2),
        "beam_search: inputs ... np.array(ids)",
    ),
]
# Of `ValueError`:
WRONG: list[tuple[Any, str]] = [
    (
        lambda: models.generate(LM, TOKENS, max_new_tokens=2.5),
        "max_new_tokens=2.5 ... an integer",
    ),
    (
        lambda: generate(TOKENS, temperature=1.0, top_k=2.5, key=KEY),
        "top_k=2.5 ... an integer",
    ),
    (
        lambda: generate(TOKENS, models.beam_search, num_beams=2.5),
        "num_beams=2.5 ... an integer",
    ),
]


if __name__ == "__main__":
    tell((CONFUSED, TypeError), (WRONG, ValueError))

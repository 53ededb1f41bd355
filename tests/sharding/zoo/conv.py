"""Convolutions and recurrent cells."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import COL, ROW, SEQ, WHOLE, D, Entry, F, linear, pairs, squared_loss

SIDE = 4


class ConvPair(eqx.Module):
    conv1: Any
    conv2: Any

    def __init__(self, key, conv):
        k1, k2 = jax.random.split(key)
        self.conv1 = conv(D, F, 3, padding=1, key=k1)
        self.conv2 = conv(F, D, 3, padding=1, key=k2)

    def __call__(self, x):
        return x + self.conv2(jax.nn.relu(self.conv1(x)))


class Shortcut(eqx.Module):
    """A block of a ResNet that widens the stream."""

    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    conv_shortcut: eqx.nn.Conv2d

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.conv1 = eqx.nn.Conv2d(D, F, 3, padding=1, key=k1)
        self.conv2 = eqx.nn.Conv2d(F, F, 3, padding=1, key=k2)
        self.conv_shortcut = eqx.nn.Conv2d(D, F, 1, key=k3)

    def __call__(self, x):
        return self.conv_shortcut(x) + self.conv2(jax.nn.relu(self.conv1(x)))


class InvertedResidual(eqx.Module):
    """MobileNet: expand, depthwise, project."""

    expand: eqx.nn.Conv2d
    depthwise: eqx.nn.Conv2d
    project: eqx.nn.Conv2d

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.expand = eqx.nn.Conv2d(D, F, 1, key=k1)
        self.depthwise = eqx.nn.Conv2d(F, F, 3, padding=1, groups=F, key=k2)
        self.project = eqx.nn.Conv2d(F, D, 1, key=k3)

    def __call__(self, x):
        return x + self.project(jax.nn.relu(self.depthwise(jax.nn.relu(self.expand(x)))))


class Recurrent(eqx.Module):
    """A cell over time, and a head."""

    cell: Any
    head: eqx.nn.Linear

    def __init__(self, key, cell):
        k1, k2 = jax.random.split(key)
        self.cell, self.head = cell(8, D, key=k1), linear(D, D, k2)

    def __call__(self, x):
        is_lstm = isinstance(self.cell, eqx.nn.LSTMCell)
        start = (jnp.zeros(D), jnp.zeros(D)) if is_lstm else jnp.zeros(D)
        state = jax.lax.scan(lambda state, x: (self.cell(x, state), None), start, x)[0]
        return self.head(state[0] if is_lstm else state)


CONV_PAIR_SPECS = {"conv1.weight": COL, "conv1.bias": COL, "conv2.weight": ROW, "conv2.bias": WHOLE}

ENTRIES = [
    Entry(
        "conv2d",
        partial(ConvPair, conv=eqx.nn.Conv2d),
        pairs(D, SIDE, SIDE),
        squared_loss(),
        CONV_PAIR_SPECS,
        1,
        "a bias is (out, 1, 1)",
        activation_sizes=(D * SIDE * SIDE,),
    ),
    Entry(
        "conv1d",
        partial(ConvPair, conv=eqx.nn.Conv1d),
        pairs(D, SEQ),
        squared_loss(),
        CONV_PAIR_SPECS,
        1,
        "weights are (out, in, 3): three dims, and no experts",
    ),
    Entry(
        "conv_shortcut",
        Shortcut,
        pairs(D, SIDE, SIDE, out=(F, SIDE, SIDE)),
        squared_loss(),
        {**CONV_PAIR_SPECS, "conv_shortcut.*": WHOLE},
        1,
        "the shortcut has the shape of what opens the pair, and is no sibling of it: the stream stays whole",
        activation_sizes=(F * SIDE * SIDE,),
    ),
    Entry(
        "conv_depthwise",
        InvertedResidual,
        pairs(D, SIDE, SIDE),
        squared_loss(),
        {
            "expand.*": COL,
            "depthwise.*": COL,
            "project.weight": ROW,
            "project.bias": WHOLE,
        },
        1,
        "the depthwise weight is (out, 1, 3, 3): it follows the split of the channels that it gets",
        activation_sizes=(D * SIDE * SIDE,),
    ),
    Entry(
        "gru",
        partial(Recurrent, cell=eqx.nn.GRUCell),
        pairs(SEQ, 8, out=(D,)),
        squared_loss(),
        {"cell.*": WHOLE, "head.*": ...},
        None,
        "a split cell would reduce at every time step; the lone head may be split or not",
    ),
    Entry(
        "lstm",
        partial(Recurrent, cell=eqx.nn.LSTMCell),
        pairs(SEQ, 8, out=(D,)),
        squared_loss(),
        {"cell.*": WHOLE, "head.*": ...},
        None,
        "as gru",
    ),
]

"""Models as users write them, each with a loss: ten kinds of which layouts or their
predictions were wrong once.

Most of their names say nothing to the path rules: what a layer is must follow from its
shape or from the program. Each is small. The neural CDE needs `pip install diffrax`.
"""

import importlib
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class Stranger(NamedTuple):
    """A model in the style of users.

    - `make`: key -> model.
    - `loss`: (model, batch, key) -> loss, or the loss and a dict of others.
    - `needs`: a package that must be installed.
    """

    name: str
    make: Callable[[Any], Any]
    loss: Callable[..., Any]
    batch: Any
    needs: str | None = None


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _mean_square(model: Any, batch: Any, key: Any) -> Any:
    return (jax.vmap(model)(batch) ** 2).mean()


def _normal(key: Any, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / math.sqrt(shape[-1])


def _linear(key: Any, num_in: int, num_out: int, *, bias: bool = True) -> eqx.nn.Linear:
    return eqx.nn.Linear(num_in, num_out, bias, key=key)


def _each(layer: Any, x: Any) -> Any:
    """Apply a layer to every token."""
    return jax.vmap(layer)(x)


# Parts that several models share.


class Mixer(eqx.Module):
    """Attention of (time, dim) to itself."""

    ask: eqx.nn.Linear
    match: eqx.nn.Linear
    carry: eqx.nn.Linear
    join: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, dim: int, num_heads: int, *, key: Any):
        keys = jax.random.split(key, 4)
        self.ask = _linear(keys[0], dim, dim)
        self.match = _linear(keys[1], dim, dim)
        self.carry = _linear(keys[2], dim, dim)
        self.join = _linear(keys[3], dim, dim)
        self.num_heads = num_heads

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def heads(x: jax.Array) -> jax.Array:
            return x.reshape(len(x), self.num_heads, -1)  # (time, heads, head dim)

        queries = heads(_each(self.ask, tokens))
        keys = heads(_each(self.match, tokens))
        values = heads(_each(self.carry, tokens))
        scores = jnp.einsum("qhd,khd->hqk", queries, keys)
        weights = jax.nn.softmax(scores / math.sqrt(queries.shape[-1]))
        mixed = jnp.einsum("hqk,khd->qhd", weights, values)
        return _each(self.join, mixed.reshape(len(tokens), -1))


class Wide(eqx.Module):
    """An MLP with a hidden layer of four times the width, of one token."""

    widen: eqx.nn.Linear
    narrow: eqx.nn.Linear

    def __init__(self, dim: int, *, key: Any):
        first, second = jax.random.split(key)
        self.widen = _linear(first, dim, 4 * dim)
        self.narrow = _linear(second, 4 * dim, dim)

    def __call__(self, token: jax.Array) -> jax.Array:
        return self.narrow(jax.nn.gelu(self.widen(token)))


# Mamba-2.


class Mamba2(eqx.Module):
    """A layer with one projection for all its inputs, computed in chunks."""

    enter: eqx.nn.Linear
    short: eqx.nn.Conv1d
    step_bias: jax.Array
    log_decay: jax.Array
    skip: jax.Array
    scale: jax.Array
    out: eqx.nn.Linear
    inner: int = eqx.field(static=True)
    num_states: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)

    def __init__(
        self,
        dim: int = 128,
        num_heads: int = 8,
        num_states: int = 16,
        chunk: int = 16,
        *,
        key: Any,
    ):
        keys = jax.random.split(key, 6)
        self.inner = 2 * dim
        self.num_states = num_states
        self.chunk = chunk
        # The inputs, and the vectors that write to the states and read them.
        channels = self.inner + 2 * num_states
        num_outputs = self.inner + channels + num_heads
        self.enter = _linear(keys[0], dim, num_outputs, bias=False)
        self.short = eqx.nn.Conv1d(
            channels, channels, 4, groups=channels, padding=((3, 0),), key=keys[1]
        )
        self.step_bias = _normal(keys[2], num_heads)
        self.log_decay = _normal(keys[3], num_heads)
        self.skip = _normal(keys[4], num_heads)
        self.scale = jnp.ones(self.inner)
        self.out = _linear(keys[5], self.inner, dim, bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        time = len(tokens)
        num_heads = len(self.skip)
        gates, mixed, steps = jnp.split(
            _each(self.enter, tokens),
            [self.inner, 2 * self.inner + 2 * self.num_states],
            axis=1,
        )
        mixed = jax.nn.silu(self.short(mixed.T).T)
        inputs, write, read = jnp.split(
            mixed, [self.inner, self.inner + self.num_states], axis=1
        )
        inputs = inputs.reshape(time, num_heads, -1)  # (time, heads, head dim)
        steps = jax.nn.softplus(steps + self.step_bias)  # (time, heads)
        outputs = self._recur(
            inputs, write, read, steps, -jnp.exp(self.log_decay) * steps
        )
        outputs = outputs.reshape(time, num_heads, -1) + inputs * self.skip[:, None]
        outputs = outputs.reshape(time, -1) * jax.nn.silu(gates)
        mean_square = (outputs**2).mean(-1, keepdims=True)
        outputs = outputs * jax.lax.rsqrt(mean_square + 1e-5) * self.scale
        return tokens + _each(self.out, outputs)

    def _recur(
        self,
        inputs: jax.Array,
        write: jax.Array,
        read: jax.Array,
        steps: jax.Array,
        log_decays: jax.Array,
    ) -> jax.Array:
        """Return (chunks, chunk, heads, head dim)."""

        def chunks(x: jax.Array) -> jax.Array:
            return x.reshape(len(x) // self.chunk, self.chunk, *x.shape[1:])

        inputs = chunks(inputs)
        write = chunks(write)
        read = chunks(read)
        steps = chunks(steps)
        passed = jnp.cumsum(chunks(log_decays), axis=1)  # (chunks, chunk, heads)
        between = passed[:, :, None] - passed[:, None]
        causal = jnp.tril(jnp.ones((self.chunk, self.chunk), bool))
        decays = jnp.where(causal[None, :, :, None], jnp.exp(between), 0)
        within = jnp.einsum(
            "cqs,cks,cqkh,ckh,ckhp->cqhp", read, write, decays, steps, inputs
        )
        to_end = jnp.exp(passed[:, -1:] - passed)
        states = jnp.einsum("cks,ckh,ckhp->chps", write, steps * to_end, inputs)

        def of_chunk(state: Any, chunk: Any) -> Any:
            decay, new = chunk
            return state * decay[:, None, None] + new, state

        _, before = jax.lax.scan(
            of_chunk, jnp.zeros(states.shape[1:]), (jnp.exp(passed[:, -1]), states)
        )
        return within + jnp.einsum("cqs,chps,cqh->cqhp", read, before, jnp.exp(passed))


class Mamba2Apart(eqx.Module):
    """The layer with its projections apart, as for tensor parallelism, step by step."""

    sieve: eqx.nn.Linear
    enter: eqx.nn.Linear
    states: eqx.nn.Linear  # what writes to them, and what reads them
    step: eqx.nn.Linear
    short: eqx.nn.Conv1d
    step_bias: jax.Array
    log_decay: jax.Array
    skip: jax.Array
    out: eqx.nn.Linear

    def __init__(
        self, dim: int = 128, num_heads: int = 8, num_states: int = 16, *, key: Any
    ):
        keys = jax.random.split(key, 9)
        inner = 2 * dim
        self.sieve = _linear(keys[0], dim, inner)
        self.enter = _linear(keys[1], dim, inner)
        self.states = _linear(keys[2], dim, 2 * num_states)
        self.step = _linear(keys[3], dim, num_heads)
        self.short = eqx.nn.Conv1d(
            inner, inner, 4, groups=inner, padding=((3, 0),), key=keys[4]
        )
        self.step_bias = _normal(keys[5], num_heads)
        self.log_decay = _normal(keys[6], num_heads)
        self.skip = _normal(keys[7], num_heads)
        self.out = _linear(keys[8], inner, dim)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        time = len(tokens)
        num_heads = len(self.skip)
        inputs = jax.nn.silu(self.short(_each(self.enter, tokens).T).T)
        inputs = inputs.reshape(time, num_heads, -1)  # (time, heads, head dim)
        write, read = jnp.split(_each(self.states, tokens), 2, axis=1)
        steps = jax.nn.softplus(_each(self.step, tokens) + self.step_bias)
        decays = jnp.exp(-jnp.exp(self.log_decay) * steps)  # (time, heads)

        def of_token(state: Any, token: Any) -> Any:
            decay, step, inputs, write, read = token
            state = state * decay[:, None, None]
            state = state + (step[:, None] * inputs)[:, :, None] * write
            return state, state @ read

        zeros = jnp.zeros((num_heads, inputs.shape[-1], write.shape[1]))
        _, outputs = jax.lax.scan(of_token, zeros, (decays, steps, inputs, write, read))
        outputs = (outputs + inputs * self.skip[:, None]).reshape(time, -1)
        return tokens + _each(
            self.out, outputs * jax.nn.silu(_each(self.sieve, tokens))
        )


# RWKV-6.


class Rwkv6(eqx.Module):
    """A block: the mix over time, then that over channels."""

    shares: jax.Array  # of the token before, for each of seven layers
    receive: eqx.nn.Linear
    index: eqx.nn.Linear
    content: eqx.nn.Linear
    sieve: eqx.nn.Linear
    fade_in: eqx.nn.Linear
    fade_out: eqx.nn.Linear
    fade_bias: jax.Array
    bonus: jax.Array
    leave: eqx.nn.Linear
    channel_in: eqx.nn.Linear
    channel_sieve: eqx.nn.Linear
    channel_out: eqx.nn.Linear
    norm: eqx.nn.GroupNorm
    num_heads: int = eqx.field(static=True)

    def __init__(self, dim: int = 128, num_heads: int = 8, *, key: Any):
        keys = jax.random.split(key, 13)

        def linear(index: int, num_in: int, num_out: int) -> eqx.nn.Linear:
            return _linear(keys[index], num_in, num_out, bias=False)

        self.shares = _normal(keys[0], 7, dim)
        self.receive = linear(1, dim, dim)
        self.index = linear(2, dim, dim)
        self.content = linear(3, dim, dim)
        self.sieve = linear(4, dim, dim)
        self.fade_in = linear(5, dim, 16)
        self.fade_out = linear(6, 16, dim)
        self.fade_bias = _normal(keys[7], dim)
        self.bonus = _normal(keys[8], dim)
        self.leave = linear(9, dim, dim)
        self.channel_in = linear(10, dim, 4 * dim)
        self.channel_sieve = linear(11, dim, dim)
        self.channel_out = linear(12, 4 * dim, dim)
        self.norm = eqx.nn.GroupNorm(num_heads, dim)
        self.num_heads = num_heads

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self._over_time(tokens)
        return tokens + self._over_channels(tokens)

    def _mixed(self, tokens: jax.Array, layers: list[int]) -> list[jax.Array]:
        """Return the tokens with a share of those before them, for each layer."""
        before = jnp.concatenate([jnp.zeros_like(tokens[:1]), tokens[:-1]])
        return [tokens + self.shares[i] * (before - tokens) for i in layers]

    def _over_time(self, tokens: jax.Array) -> jax.Array:
        mixed = self._mixed(tokens, [0, 1, 2, 3, 4])

        def heads(x: jax.Array) -> jax.Array:
            return x.reshape(len(x), self.num_heads, -1)  # (time, heads, head dim)

        receive = heads(_each(self.receive, mixed[0]))
        index = heads(_each(self.index, mixed[1]))
        content = heads(_each(self.content, mixed[2]))
        gates = jax.nn.silu(_each(self.sieve, mixed[3]))
        low_rank = jnp.tanh(_each(self.fade_in, mixed[4]))
        fades = self.fade_bias + _each(self.fade_out, low_rank)
        fades = heads(jnp.exp(-jnp.exp(fades)))
        bonus = self.bonus.reshape(self.num_heads, -1)

        def of_token(state: Any, token: Any) -> Any:
            receive, index, content, fade = token
            new = index[:, :, None] * content[:, None]  # (heads, head dim, head dim)
            read = jnp.einsum("hk,hkv->hv", receive, state + bonus[:, :, None] * new)
            return state * fade[:, :, None] + new, read

        zeros = jnp.zeros((self.num_heads, index.shape[-1], content.shape[-1]))
        _, reads = jax.lax.scan(of_token, zeros, (receive, index, content, fades))
        reads = _each(self.norm, reads.reshape(len(tokens), -1))
        return _each(self.leave, reads * gates)

    def _over_channels(self, tokens: jax.Array) -> jax.Array:
        mixed = self._mixed(tokens, [5, 6])
        hidden = jax.nn.relu(_each(self.channel_in, mixed[0]))
        gates = jax.nn.sigmoid(_each(self.channel_sieve, mixed[1]))
        return gates * _each(self.channel_out, jnp.square(hidden))


# DiT.


class DiTBlock(eqx.Module):
    """Attention and an MLP, scaled, shifted and gated by a condition."""

    attend: Mixer
    wide: Wide
    modulate: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, dim: int, num_heads: int, *, key: Any):
        keys = jax.random.split(key, 3)
        self.attend = Mixer(dim, num_heads, key=keys[0])
        self.wide = Wide(dim, key=keys[1])
        self.modulate = _linear(keys[2], dim, 6 * dim)
        self.norm = eqx.nn.LayerNorm(dim, use_weight=False, use_bias=False)

    def __call__(self, tokens: jax.Array, condition: jax.Array) -> jax.Array:
        parts = jnp.split(self.modulate(jax.nn.silu(condition)), 6)
        scale, shift, gate, wide_scale, wide_shift, wide_gate = parts
        normed = _each(self.norm, tokens) * (1 + scale) + shift
        tokens = tokens + gate * self.attend(normed)
        normed = _each(self.norm, tokens) * (1 + wide_scale) + wide_shift
        return tokens + wide_gate * _each(self.wide, normed)


class DiT(eqx.Module):
    """A transformer of the patches of an image, given a time and a label."""

    patch: eqx.nn.Conv2d
    positions: jax.Array
    time_in: eqx.nn.Linear
    time_out: eqx.nn.Linear
    labels: eqx.nn.Embedding
    blocks: list[DiTBlock]
    out: eqx.nn.Linear
    modulate: eqx.nn.Linear

    def __init__(
        self, dim: int = 128, num_heads: int = 8, num_blocks: int = 2, *, key: Any
    ):
        keys = jax.random.split(key, 8)
        self.patch = eqx.nn.Conv2d(3, dim, 2, 2, key=keys[0])
        self.positions = _normal(keys[1], 64, dim)
        self.time_in = _linear(keys[2], 64, dim)
        self.time_out = _linear(keys[3], dim, dim)
        self.labels = eqx.nn.Embedding(16, dim, key=keys[4])
        self.blocks = [
            DiTBlock(dim, num_heads, key=k)
            for k in jax.random.split(keys[5], num_blocks)
        ]
        self.out = _linear(keys[6], dim, 12)
        self.modulate = _linear(keys[7], dim, 2 * dim)

    def __call__(
        self, image: jax.Array, time: jax.Array, label: jax.Array
    ) -> jax.Array:
        patches = self.patch(image)  # (dim, 8, 8)
        tokens = patches.reshape(-1, 64).T + self.positions
        angles = jnp.exp(-jnp.arange(32) / 5.0) * time
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)])
        condition = self.time_out(jax.nn.silu(self.time_in(waves)))
        condition = condition + self.labels(label)
        for block in self.blocks:
            tokens = block(tokens, condition)
        scale, shift = jnp.split(self.modulate(condition), 2)
        return _each(self.out, tokens * (1 + scale) + shift)  # (64, 3 * 2 * 2)


def _dit_loss(model: Any, batch: Any, key: Any) -> Any:
    found = jax.vmap(model)(batch["image"], batch["time"], batch["label"])
    return (found**2).mean()


# Swin.


class Window(eqx.Module):
    """Attention within windows of 4 x 4, moved by `shift`, and an MLP."""

    fused: eqx.nn.Linear
    table: jax.Array  # a bias for each difference of positions and head
    join: eqx.nn.Linear
    wide: Wide
    norm: eqx.nn.LayerNorm
    shift: int = eqx.field(static=True)

    def __init__(self, dim: int, shift: int, *, key: Any):
        keys = jax.random.split(key, 4)
        self.fused = _linear(keys[0], dim, 3 * dim)
        self.table = _normal(keys[1], 7 * 7, 8)
        self.join = _linear(keys[2], dim, dim)
        self.wide = Wide(dim, key=keys[3])
        self.norm = eqx.nn.LayerNorm(dim)
        self.shift = shift

    def _bias(self) -> jax.Array:
        """Return (heads, 16, 16)."""
        grid = jnp.meshgrid(jnp.arange(4), jnp.arange(4), indexing="ij")
        places = jnp.stack(grid, -1).reshape(16, 2)
        differences = places[:, None] - places[None] + 3
        return self.table[differences @ jnp.array([7, 1])].transpose(2, 0, 1)

    def __call__(self, image: jax.Array) -> jax.Array:
        height, width, dim = image.shape
        rows, columns = height // 4, width // 4
        moved = jnp.roll(image, (-self.shift, -self.shift), (0, 1))
        windows = moved.reshape(rows, 4, columns, 4, dim).transpose(0, 2, 1, 3, 4)
        windows = windows.reshape(-1, 16, dim)
        fused = _each(jax.vmap(self.fused), _each(jax.vmap(self.norm), windows))
        fused = fused.reshape(-1, 16, 3, 8, dim // 8).transpose(2, 0, 3, 1, 4)
        queries, keys, values = fused  # (windows, heads, 16, head dim)
        scores = queries @ keys.swapaxes(-1, -2) / 4
        mixed = jax.nn.softmax(scores + self._bias()) @ values
        mixed = mixed.transpose(0, 2, 1, 3).reshape(-1, 16, dim)
        joined = _each(jax.vmap(self.join), mixed)
        joined = joined.reshape(rows, columns, 4, 4, dim).transpose(0, 2, 1, 3, 4)
        joined = joined.reshape(height, width, dim)
        image = image + jnp.roll(joined, (self.shift, self.shift), (0, 1))
        return image + _each(jax.vmap(self.wide), image)


class Swin(eqx.Module):
    """Two blocks, of which the second is shifted, and one of half the resolution."""

    patch: eqx.nn.Conv2d
    first: Window
    second: Window
    merge: eqx.nn.Linear
    third: Window
    head: eqx.nn.Linear

    def __init__(self, dim: int = 64, *, key: Any):
        keys = jax.random.split(key, 6)
        self.patch = eqx.nn.Conv2d(3, dim, 2, 2, key=keys[0])
        self.first = Window(dim, 0, key=keys[1])
        self.second = Window(dim, 2, key=keys[2])
        self.merge = _linear(keys[3], 4 * dim, 2 * dim, bias=False)
        self.third = Window(2 * dim, 0, key=keys[4])
        self.head = _linear(keys[5], 2 * dim, 16)

    def __call__(self, image: jax.Array) -> jax.Array:
        patches = self.patch(image).transpose(1, 2, 0)  # (height, width, dim)
        patches = self.second(self.first(patches))
        height, width, dim = patches.shape
        fours = patches.reshape(height // 2, 2, width // 2, 2, dim)
        fours = fours.transpose(0, 2, 1, 3, 4)
        fours = fours.reshape(height // 2, width // 2, 4 * dim)
        merged = self.third(_each(jax.vmap(self.merge), fours))
        return self.head(merged.mean((0, 1)))


# A mixture of experts with capacity.


class Experts(eqx.Module):
    """Attention, then two of eight experts for each token of a batch, of which each
    takes up to a number of tokens: those beyond are dropped."""

    choose: eqx.nn.Linear
    widen: jax.Array
    narrow: jax.Array
    attend: Mixer

    def __init__(
        self,
        dim: int = 128,
        num_experts: int = 8,
        hidden: int = 256,
        *,
        key: Any,
    ):
        keys = jax.random.split(key, 4)
        self.choose = _linear(keys[0], dim, num_experts, bias=False)
        self.widen = _normal(keys[1], num_experts, dim, hidden)
        self.narrow = _normal(keys[2], num_experts, hidden, dim)
        self.attend = Mixer(dim, 8, key=keys[3])

    def __call__(self, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Take (rows, time, dim), and return as much and the loss of balance."""
        batch = batch + jax.vmap(self.attend)(batch)
        tokens = batch.reshape(-1, batch.shape[-1])
        probabilities = jax.nn.softmax(tokens @ self.choose.weight.T)
        num_tokens, num_experts = probabilities.shape
        capacity = num_tokens // 4
        weights, choices = jax.lax.top_k(probabilities, 2)
        chosen = jax.nn.one_hot(choices, num_experts)  # (tokens, 2, experts)
        # The place of a token among those that chose its expert.
        places = jnp.cumsum(chosen.reshape(-1, num_experts), axis=0)
        places = places.reshape(chosen.shape) * chosen - 1
        kept = (places < capacity) * chosen
        slots = jax.nn.one_hot(places.astype(jnp.int32), capacity)
        dispatch = jnp.einsum("nke,nkec->nec", kept, slots)
        combine = jnp.einsum("nk,nke,nkec->nec", weights, kept, slots)
        taken = jnp.einsum("nec,nd->ecd", dispatch, tokens)
        hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", taken, self.widen))
        given = jnp.einsum("ecf,efd->ecd", hidden, self.narrow)
        balance = chosen[:, 0].mean(0) * probabilities.mean(0)
        mixed = jnp.einsum("nec,ecd->nd", combine, given)
        return batch + mixed.reshape(batch.shape), balance.sum() * num_experts


def _experts_loss(model: Any, batch: Any, key: Any) -> Any:
    found, balance = model(batch)
    return (found**2).mean() + 0.01 * balance, {"balance": balance}


# CLIP.


class Tower(eqx.Module):
    """A transformer whose mean output has length 1."""

    enter: eqx.nn.Linear
    mixers: list[Mixer]
    wides: list[Wide]
    leave: eqx.nn.Linear

    def __init__(
        self, num_in: int, dim: int, num_out: int, num_layers: int = 2, *, key: Any
    ):
        keys = jax.random.split(key, 4)
        self.enter = _linear(keys[0], num_in, dim)
        self.mixers = [
            Mixer(dim, 8, key=k) for k in jax.random.split(keys[1], num_layers)
        ]
        self.wides = [Wide(dim, key=k) for k in jax.random.split(keys[2], num_layers)]
        self.leave = _linear(keys[3], dim, num_out, bias=False)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = _each(self.enter, tokens)
        for mixer, wide in zip(self.mixers, self.wides, strict=True):
            tokens = tokens + mixer(tokens)
            tokens = tokens + _each(wide, tokens)
        pooled = self.leave(tokens.mean(0))
        return pooled / jnp.linalg.norm(pooled)


class Clip(eqx.Module):
    """A tower of images in patches, and one of texts."""

    images: Tower
    texts: Tower
    tokens: eqx.nn.Embedding
    log_scale: jax.Array

    def __init__(self, *, key: Any):
        keys = jax.random.split(key, 3)
        self.images = Tower(48, 128, 64, key=keys[0])
        self.texts = Tower(64, 64, 64, key=keys[1])
        self.tokens = eqx.nn.Embedding(512, 64, key=keys[2])
        self.log_scale = jnp.array(2.0)

    def of_text(self, text: jax.Array) -> jax.Array:
        return self.texts(_each(self.tokens, text))


def _clip_loss(model: Any, batch: Any, key: Any) -> Any:
    images = jax.vmap(model.images)(batch["image"])
    texts = jax.vmap(model.of_text)(batch["text"])
    scores = images @ texts.T * jnp.exp(model.log_scale)  # (rows, rows)
    labels = jnp.arange(len(scores))
    of_labels = optax.softmax_cross_entropy_with_integer_labels
    of_images = of_labels(scores, labels).mean()
    of_texts = of_labels(scores.T, labels).mean()
    return (of_images + of_texts) / 2


# DoRA.


class Dora(eqx.Module):
    """A frozen weight with a change of low rank, whose rows have learned lengths."""

    frozen: jax.Array
    down: jax.Array
    up: jax.Array
    lengths: jax.Array

    def __init__(self, num_in: int, num_out: int, rank: int = 8, *, key: Any):
        keys = jax.random.split(key, 3)
        self.frozen = _normal(keys[0], num_out, num_in)
        self.down = _normal(keys[1], rank, num_in)
        self.up = _normal(keys[2], num_out, rank)
        self.lengths = jnp.ones(num_out)

    def __call__(self, x: jax.Array) -> jax.Array:
        weight = jax.lax.stop_gradient(self.frozen) + self.up @ self.down
        # The lengths are constant for the gradient (section 4.3 of the paper).
        norms = jnp.linalg.norm(weight, axis=1, keepdims=True)
        directions = weight / jax.lax.stop_gradient(norms)
        return (directions * self.lengths[:, None]) @ x


class DoraMlp(eqx.Module):
    first: Dora
    second: Dora

    def __init__(self, *, key: Any):
        first, second = jax.random.split(key)
        self.first = Dora(128, 512, key=first)
        self.second = Dora(512, 128, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.second(jax.nn.gelu(self.first(x)))


# A neural CDE.


class NeuralCde(eqx.Module):
    """A controlled differential equation along a series, by a solver of diffrax."""

    start: eqx.nn.Linear
    field: eqx.nn.MLP
    read: eqx.nn.Linear

    def __init__(self, num_in: int = 8, hidden: int = 32, *, key: Any):
        keys = jax.random.split(key, 3)
        self.start = _linear(keys[0], num_in, hidden)
        self.field = eqx.nn.MLP(
            hidden,
            hidden * num_in,
            128,
            1,
            activation=jax.nn.softplus,
            final_activation=jnp.tanh,
            key=keys[1],
        )
        self.read = _linear(keys[2], hidden, 4)

    def __call__(self, series: jax.Array) -> jax.Array:
        diffrax = importlib.import_module("diffrax")
        times = jnp.linspace(0, 1, len(series))
        control = diffrax.LinearInterpolation(times, series)

        def field(time: Any, state: jax.Array, args: Any) -> jax.Array:
            return self.field(state).reshape(-1, series.shape[1])

        solution = diffrax.diffeqsolve(
            diffrax.ControlTerm(field, control).to_ode(),
            diffrax.Heun(),
            0.0,
            1.0,
            0.125,
            self.start(series[0]),
            max_steps=16,
        )
        return self.read(solution.ys[-1])


# A diffusion U-Net.


class Residual(eqx.Module):
    """Two convolutions, of which the first gets the time."""

    norm_in: eqx.nn.GroupNorm
    conv_in: eqx.nn.Conv2d
    time: eqx.nn.Linear
    norm_out: eqx.nn.GroupNorm
    conv_out: eqx.nn.Conv2d
    skip: eqx.nn.Conv2d

    def __init__(self, num_in: int, num_out: int, *, key: Any):
        keys = jax.random.split(key, 4)
        self.norm_in = eqx.nn.GroupNorm(8, num_in)
        self.conv_in = eqx.nn.Conv2d(num_in, num_out, 3, padding=1, key=keys[0])
        self.time = _linear(keys[1], 64, num_out)
        self.norm_out = eqx.nn.GroupNorm(8, num_out)
        self.conv_out = eqx.nn.Conv2d(num_out, num_out, 3, padding=1, key=keys[2])
        self.skip = eqx.nn.Conv2d(num_in, num_out, 1, key=keys[3])

    def __call__(self, image: jax.Array, time: jax.Array) -> jax.Array:
        hidden = self.conv_in(jax.nn.silu(self.norm_in(image)))
        hidden = hidden + self.time(time)[:, None, None]
        return self.skip(image) + self.conv_out(jax.nn.silu(self.norm_out(hidden)))


class DiffusionUNet(eqx.Module):
    """Two levels, with attention at the lower one."""

    enter: eqx.nn.Conv2d
    of_time: eqx.nn.MLP
    down: Residual
    half: eqx.nn.Conv2d
    low: Residual
    attend: Mixer
    middle: Residual
    double: eqx.nn.ConvTranspose2d
    up: Residual
    leave: eqx.nn.Conv2d

    def __init__(self, channels: int = 32, *, key: Any):
        keys = jax.random.split(key, 10)
        low = 2 * channels
        self.enter = eqx.nn.Conv2d(3, channels, 3, padding=1, key=keys[0])
        self.of_time = eqx.nn.MLP(32, 64, 128, 1, key=keys[1])
        self.down = Residual(channels, channels, key=keys[2])
        self.half = eqx.nn.Conv2d(channels, low, 3, 2, 1, key=keys[3])
        self.low = Residual(low, low, key=keys[4])
        self.attend = Mixer(low, 4, key=keys[5])
        self.middle = Residual(low, low, key=keys[6])
        self.double = eqx.nn.ConvTranspose2d(low, channels, 2, 2, key=keys[7])
        self.up = Residual(low, channels, key=keys[8])
        self.leave = eqx.nn.Conv2d(channels, 3, 3, padding=1, key=keys[9])

    def __call__(self, image: jax.Array, time: jax.Array) -> jax.Array:
        time = jax.nn.silu(self.of_time(jnp.sin(time * jnp.arange(32))))
        high = self.down(self.enter(image), time)
        low = self.low(self.half(high), time)
        tokens = low.reshape(len(low), -1).T  # (height * width, channels)
        low = low + self.attend(tokens).T.reshape(low.shape)
        raised = self.double(self.middle(low, time))
        return self.leave(self.up(jnp.concatenate([raised, high]), time))


def _unet_loss(model: Any, batch: Any, key: Any) -> Any:
    return (jax.vmap(model)(batch["image"], batch["time"]) ** 2).mean()


STRANGERS = [
    Stranger("Mamba-2", lambda key: Mamba2(key=key), _mean_square, _floats(8, 64, 128)),
    Stranger(
        "Mamba-2, projections apart",
        lambda key: Mamba2Apart(key=key),
        _mean_square,
        _floats(8, 32, 128),
    ),
    Stranger("RWKV-6", lambda key: Rwkv6(key=key), _mean_square, _floats(8, 32, 128)),
    Stranger(
        "DiT",
        lambda key: DiT(key=key),
        _dit_loss,
        {"image": _floats(8, 3, 16, 16), "time": _floats(8), "label": _ints(8)},
    ),
    Stranger("Swin", lambda key: Swin(key=key), _mean_square, _floats(8, 3, 32, 32)),
    Stranger(
        "MoE with capacity",
        lambda key: Experts(key=key),
        _experts_loss,
        _floats(8, 32, 128),
    ),
    Stranger(
        "CLIP towers",
        lambda key: Clip(key=key),
        _clip_loss,
        {"image": _floats(16, 16, 48), "text": _ints(16, 16)},
    ),
    Stranger("DoRA", lambda key: DoraMlp(key=key), _mean_square, _floats(16, 128)),
    Stranger(
        "diffusion U-Net",
        lambda key: DiffusionUNet(key=key),
        _unet_loss,
        {"image": _floats(8, 3, 16, 16), "time": _floats(8)},
    ),
    Stranger(
        "neural CDE",
        lambda key: NeuralCde(key=key),
        _mean_square,
        _floats(16, 16, 8),
        needs="diffrax",
    ),
]


def strangers() -> tuple[list[Stranger], dict[str, str]]:
    """Return the models whose packages are installed, and the reasons why others are
    missing."""
    found, missing = [], {}
    for stranger in STRANGERS:
        if stranger.needs is not None and find_spec(stranger.needs) is None:
            missing[stranger.name] = f"{stranger.needs} is not installed"
        else:
            found.append(stranger)
    return found, missing

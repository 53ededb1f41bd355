"""`load_pretrained`: arrays, dtypes and layout are those of the files, of which no byte
is read twice."""

import json
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import LAYERS, SINGLE, in_file_form, make_arrays, write
from fit_helpers import assert_same
from helpers import in_long
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from tiny_models import ENCODERS, VOCABULARY, abstract, loss_fn, make

import redco_eqx as rx
import redco_eqx_models as models
from redco_eqx._base.tree import to_arrays, to_paths
from redco_eqx_models import load_pretrained, save_pretrained
from redco_eqx_models._files.safetensors import Stored

LAYOUTS: list[Any] = [
    ("gpt2", {"tensor": 2, "fsdp": 2}, True),
    ("llama", {"tensor": 4, "data": 1}, False),
    ("llama", None, True),
    *in_long(
        ("gpt2", {"tensor": 4, "data": 1}, False),
        ("llama", {"tensor": 2, "fsdp": 2}, True),
    ),
]


@pytest.mark.parametrize(("family", "axes", "stacked"), LAYOUTS)
def test_arrays_are_those_of_the_file_and_no_number_is_read_twice(
    tmp_path, monkeypatch, family, axes, stacked
):
    reads = []
    read = Stored.read

    def counting(self, index):
        array = read(self, index)
        reads.append((self.key, index, array.nbytes))
        return array

    monkeypatch.setattr(Stored, "read", counting)
    arrays = make_arrays(family, jnp.bfloat16)
    write(tmp_path, family, arrays, num_files=3 if stacked else 1)
    # A conversion happens slice by slice, after reading.
    mesh = None if axes is None else rx.make_mesh(**axes)
    model = load_pretrained(tmp_path, mesh, stacked=stacked, dtype=jnp.float32)
    assert_same(
        in_file_form(model), {key: x.astype(jnp.float32) for key, x in arrays.items()}
    )
    where = {x.sharding.mesh for x in to_arrays(model).values()}
    assert len(where) == 1
    expected = rx.shard_rules(model, where.pop())
    placed = {path: x.sharding for path, x in to_arrays(model).items()}
    assert placed == to_paths(expected, lambda x: x is not None)
    assert mesh is None or any(not x.is_fully_replicated for x in placed.values())
    # Every number is read once, however many devices hold it.
    times = {key: np.zeros(x.shape, int) for key, x in arrays.items()}
    for key, index, num_bytes in reads:
        times[key][index] += 1
        assert num_bytes == times[key][index].size * 2
    assert all((x == 1).all() for x in times.values())


def test_dtypes(tmp_path):
    kinds: tuple[Any, ...] = (np.float16, jnp.bfloat16, np.float32)
    for stored in kinds:
        arrays = make_arrays("gpt2", stored)
        write(tmp_path, "gpt2", arrays)
        for wanted in (None, jnp.float32, jnp.bfloat16, jnp.float16):
            model = load_pretrained(tmp_path, dtype=wanted, stacked=wanted is not None)
            assert_same(
                in_file_form(model),
                {key: x.astype(wanted or stored) for key, x in arrays.items()},
            )


def test_each_array_keeps_its_dtype(tmp_path):
    arrays = make_arrays("llama", jnp.bfloat16)
    norms = {key: x.astype(np.float32) for key, x in arrays.items() if "norm" in key}
    write(tmp_path, "llama", {**arrays, **norms})
    assert_same(in_file_form(load_pretrained(tmp_path)), {**arrays, **norms})
    # One layer of a stack cannot differ from another: the dtype that holds both.
    first = {k: x for k, x in norms.items() if "layers.1" not in k}
    write(tmp_path, "llama", {**arrays, **first})
    stacked = in_file_form(load_pretrained(tmp_path, stacked=True))
    changed = {k: arrays[k].astype(np.float32) for k in norms if "layers.1" in k}
    assert_same(stacked, {**arrays, **first, **changed})


def test_options_reach_the_model(tmp_path):
    write(tmp_path, "llama", make_arrays("llama"))
    with jax.default_device(jax.devices()[-1]):
        model = load_pretrained(tmp_path, stacked=True, remat="full", attention="xla")
    assert (model.remat, model.attention) == ("full", "xla")
    assert {d for x in to_arrays(model).values() for d in x.devices()} == {
        jax.devices()[-1]
    }
    assert load_pretrained(tmp_path, sequence_parallel=True).sequence_parallel
    overrides = [("model.embed_tokens.weight", P(None, "fsdp"))]
    model = load_pretrained(tmp_path, rx.make_mesh(fsdp=4, data=1), overrides=overrides)
    assert model.model.embed_tokens.weight.sharding.spec == P(None, "fsdp")


# Older spellings.


def as_first_published(arrays):
    """GPT-2's, bare and with masks."""
    old = {key.removeprefix("transformer."): x for key, x in arrays.items()}
    for i in range(LAYERS):
        old[f"h.{i}.attn.bias"] = np.tril(np.ones((1, 1, 8, 8), np.uint8))
        old[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    return old


def with_gamma(arrays):
    names = {"weight": "gamma", "bias": "beta"}
    return {
        re.sub(r"(ln_\w+\.)(\w+)", lambda m: m[1] + names[m[2]], key): x
        for key, x in arrays.items()
    }


def bare(arrays):
    return {key.removeprefix("model."): x for key, x in arrays.items()}


def as_head(table):
    return lambda arrays: {
        key.replace(table, "lm_head"): x for key, x in arrays.items()
    }


OLD = [
    ("gpt2", as_first_published),
    ("gpt2", with_gamma),
    ("gpt2", as_head("transformer.wte")),
    ("llama", bare),
    ("opt_125m", bare),
    ("opt_125m", as_head("model.decoder.embed_tokens")),
    (
        "gpt2",
        lambda arrays: (
            arrays | {"lm_head.weight": arrays["transformer.wte.weight"].copy()}
        ),
    ),
    (
        "llama",
        lambda arrays: (
            bare(arrays)
            | {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
        ),
    ),
    (
        "opt_125m",
        lambda arrays: arrays | {"model.decoder.version": np.array([3.0], np.float32)},
    ),
    (
        "gptj",
        lambda arrays: (
            arrays | {"transformer.h.0.attn.bias": np.ones((1, 1, 8, 8), bool)}
        ),
    ),
]


def test_older_spellings(tmp_path):
    for i, (family, respell) in enumerate(OLD):
        arrays = make_arrays(family)
        old = respell(arrays)
        assert old.keys() != arrays.keys()
        write(tmp_path / f"old{i}", family, old)
        save_pretrained(
            load_pretrained(tmp_path / f"old{i}", stacked=i % 2 == 0),
            tmp_path / f"new{i}",
        )
        assert_same(load_file(tmp_path / f"new{i}" / SINGLE), arrays)


def test_the_layout_is_that_of_the_program(tmp_path, recwarn):
    """The table of relative positions is split by heads, as the scores are. By names
    and shapes it is whole, as a small table that every position needs."""
    save_pretrained(make("t5"), tmp_path)
    mesh = rx.make_mesh(tensor=4)
    model = load_pretrained(tmp_path, mesh)
    assert not [x for x in recwarn if issubclass(x.category, rx.errors.ShardingWarning)]
    specs = {path: x.sharding.spec for path, x in to_arrays(model).items()}
    by_names = rx.explain(model, mesh).decisions
    (table,) = [x for x in specs if "decoder" in x and "relative_attention_bias" in x]
    assert specs[table] == P(None, "tensor")
    assert by_names[table].spec == P()


# Rows that make a vocabulary divide.

ROWS = 96  # of 64 tokens


def tables(model):
    return {path: x for path, x in to_arrays(model).items() if x.shape[0] == ROWS}


@pytest.mark.parametrize("name", ["gptj", "gemma3", *in_long("gpt2")])
def test_a_padded_model_is_the_same_model(tmp_path, name):
    layers: dict[str, Any] = {
        "n_layer" if name.startswith("gpt") else "num_hidden_layers": 1
    }
    models.save_pretrained(make(name, **layers), tmp_path / "given")
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    plain = models.load_pretrained(tmp_path / "given", mesh, stacked=True)
    padded = models.load_pretrained(
        tmp_path / "given", mesh, pad_vocabulary_to=48, stacked=True
    )
    assert tables(padded).keys() >= {
        path for path in to_arrays(padded) if "lm_head" in path
    }
    for path, x in tables(padded).items():
        assert not np.any(x[VOCABULARY:]), path
    assert len(tables(padded)) in (1, 2, 3)

    models.save_pretrained(padded, tmp_path / "saved")
    stored, given = (
        load_file(tmp_path / x / "model.safetensors") for x in ("saved", "given")
    )
    assert {key: x.tobytes() for key, x in stored.items()} == {
        key: x.tobytes() for key, x in given.items()
    }
    assert (
        json.loads((tmp_path / "saved" / "config.json").read_text())["vocab_size"]
        == VOCABULARY
    )

    tokens = jax.random.randint(jax.random.key(0), (8, 6), 0, VOCABULARY)
    wrong = (
        tokens.at[0, 0]
        .set(VOCABULARY + 3)
        .at[1, 1]
        .set(-1)
        .at[2, 2]
        .set(-VOCABULARY - 3)
    )
    tokens, wrong = jax.device_put((tokens, wrong), rx.batch_sharding(mesh))

    @eqx.filter_jit
    def run(model, tokens, wrong):
        found = eqx.filter_value_and_grad(loss_fn)(model, (tokens,), None)
        return model(tokens), model.hidden_states(wrong)[0], *found

    logits, hidden, loss, gradient = run(padded, tokens, wrong)
    expected, expected_hidden, expected_loss, expected_gradient = run(
        plain, tokens, wrong
    )
    np.testing.assert_allclose(logits[..., :VOCABULARY], expected, rtol=1e-4, atol=1e-5)
    assert bool(jnp.all(logits[..., VOCABULARY:] == -jnp.inf))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    found = to_arrays(gradient)
    for path, x in to_arrays(expected_gradient).items():
        np.testing.assert_allclose(
            found[path][: len(x)], x, rtol=1e-4, atol=1e-5, err_msg=path
        )
        assert not np.any(found[path][len(x) :])
    # NaN where it looks up what is no token.
    np.testing.assert_allclose(hidden, expected_hidden, rtol=1e-3, atol=1e-4)
    assert [bool(np.isnan(x).any()) for x in hidden[:3]] == [True, True, True]
    drawn = models.generate(
        padded, tokens[:, :4], max_new_tokens=3, temperature=50.0, key=jax.random.key(1)
    )
    assert int(jnp.max(drawn)) < VOCABULARY


def test_what_does_not_divide_is_split_once_it_is_padded():
    mesh = rx.make_mesh(tensor=4)
    plain = abstract("gpt2", vocab_size=127)
    padded = models.pad_vocabulary(plain, 4)
    assert padded.transformer.wte.weight.shape == (128, 32)
    assert rx.shard_rules(padded, mesh).transformer.wte.weight.spec == P("tensor")
    assert rx.shard_rules(plain, mesh).transformer.wte.weight.spec == P()
    assert to_arrays(models.pad_vocabulary(plain, 1)) == to_arrays(plain)


def test_models_with_an_encoder_are_refused_by_name(tmp_path):
    """Before any weight is read: there are none here."""
    for name in ENCODERS.keys() - {"clip"}:
        model: Any = abstract(name)
        with pytest.raises(
            ValueError, match=rf"pad_vocabulary: {type(model).__name__} does not name"
        ):
            models.pad_vocabulary(model, 4)
    (tmp_path / "config.json").write_text(json.dumps(ENCODERS["bart"]))
    with pytest.raises(ValueError, match=r"pad_vocabulary: .* does not name"):
        models.load_pretrained(tmp_path, rx.make_mesh(tensor=4), pad_vocabulary_to=4)

"""Encoders and encoder-decoders: outputs, gradients and files of every architecture equal those of torch."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparison import TOLERANCE, as_in_files, by_key, call, distance, encoder_inputs, output, torch_output
from references import ENCODERS
from test_files import assert_bit_equal

from redco_eqx import to_arrays
from redco_eqx.models import (
    BertConfig,
    BertForSequenceClassification,
    EncoderDecoder,
    load_pretrained,
    save_pretrained,
)

NAMES = list(ENCODERS)


def expected_of(reference, name, padding="none"):
    with torch.no_grad():
        return torch_output(reference(name), encoder_inputs(ENCODERS[name], padding)).float().numpy()


def opened(path, kind):
    """The model of transformers that a directory holds, which must have exactly its arrays."""
    model, info = kind.from_pretrained(path, output_loading_info=True)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[problem], (problem, info[problem])
    return model.eval()


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_files_equal_torchs(name, stacked, directory, reference, tmp_path):
    model = load_pretrained(directory(name), stacked=stacked)
    for padding in ENCODERS[name].padding:
        inputs = encoder_inputs(ENCODERS[name], padding)
        found, expected = output(model, inputs), expected_of(reference, name, padding)
        of_tokens = found.ndim == 3 and "decoder_input_ids" not in inputs
        mask = inputs.get("attention_mask") if of_tokens else None
        assert distance(found, expected, mask) <= TOLERANCE, padding
    save_pretrained(model, tmp_path)
    there = opened(tmp_path, type(reference(name)))
    assert_bit_equal(there, reference(name))
    with torch.no_grad():
        again = torch_output(there, encoder_inputs(ENCODERS[name])).numpy()
    # The same program on the same bits; torch does not promise the order of its sums.
    np.testing.assert_allclose(again, expected_of(reference, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_model_opens_there(name, directory, reference, tmp_path):
    loaded = load_pretrained(directory(name))
    model = type(loaded)(loaded.config, stacked=True, key=jax.random.key(0))
    save_pretrained(model, tmp_path)
    inputs = encoder_inputs(ENCODERS[name])
    with torch.no_grad():
        expected = torch_output(opened(tmp_path, type(reference(name))), inputs).numpy()
    assert np.abs(output(model, inputs) - expected).max() <= TOLERANCE * max(expected.std(), 1e-2)


@pytest.mark.parametrize(
    ("name", "stacked", "remat"),
    [
        ("t5", False, "none"),
        ("t5", True, "row_out"),
        ("t5_gated_untied", True, "full"),
        ("bart", False, "none"),
        ("bart", True, "full"),
        ("bert_masked", True, "row_out"),
        ("vit_gpt2_wider", False, "full"),
    ],
)
def test_gradients_of_the_loss_equal_torchs(name, stacked, remat, directory, reference):
    inputs = encoder_inputs(ENCODERS[name], ENCODERS[name].padding[-1])
    read = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    assert read is not None
    labels = np.random.default_rng(2).integers(3, 96, read.shape)
    if "decoder_input_ids" not in inputs:
        labels = np.where(inputs["attention_mask"] == 1, labels, -100)

    def loss(model):
        scores = jax.nn.log_softmax(call(model, jax.tree.map(jnp.asarray, inputs)))
        picked = jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return -jnp.sum(picked * (labels >= 0)) / (labels >= 0).sum()

    model = load_pretrained(directory(name), stacked=stacked, remat=remat)
    value, gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
    there = reference(name)
    there.zero_grad()
    scores = torch_output(there, inputs)
    expected = torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.tensor(labels).flatten())
    expected.backward()
    assert abs(float(value) / float(expected.detach()) - 1) <= TOLERANCE
    found = by_key(model, gradients)
    # What nothing reads (a pooler) has no gradient there.
    read_there = {key: p.grad for key, p in there.named_parameters() if p.grad is not None}
    theirs = {key: g.numpy() for key, g in as_in_files(there, read_there).items()}
    trained = {key: g for key, g in found.items() if key not in model.buffers}
    assert trained.keys() == theirs.keys()
    for key, g in trained.items():
        other = theirs[key]
        # A bias of the keys shifts all scores of a query: its gradient is zero, and rounding is all there is.
        assert np.linalg.norm(g.reshape(other.shape) - other) <= TOLERANCE * np.linalg.norm(other) + 2e-6, key


@pytest.mark.parametrize("name", [name for name in NAMES if "decoder" in ENCODERS[name].reads])
def test_token_by_token_equals_at_once(name, directory, reference):
    model = load_pretrained(directory(name), stacked=True)
    assert isinstance(model, EncoderDecoder)
    inputs = encoder_inputs(ENCODERS[name], ENCODERS[name].padding[-1])
    ids = jnp.asarray(inputs.pop("decoder_input_ids"))
    source = jnp.asarray(inputs.get("input_ids", inputs.get("pixel_values")))
    mask = inputs.get("attention_mask")
    memory = eqx.filter_jit(
        lambda m: m.encode(source, attention_mask=mask if mask is None else jnp.asarray(mask))
    )(model)

    @eqx.filter_jit
    def step(model, token, cache):
        hidden, cache = model.decode(token, memory, cache=cache)
        return model.logits(hidden), cache

    cache, found = model.init_cache(len(ids), ids.shape[1] + 2), []
    for i in range(ids.shape[1]):
        logits, cache = step(model, ids[:, i : i + 1], cache)
        found.append(logits)
    expected = expected_of(reference, name, ENCODERS[name].padding[-1])
    assert distance(np.concatenate(found, axis=1), expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["t5_gated_untied", "bart", "bert_masked", "vit_gpt2"])
def test_half_precision_is_no_worse_than_there(name, dtype, tmp_path):
    # Both are compared with float32 arithmetic on the same rounded weights; and the files are kept as they are.
    there = ENCODERS[name].make().to(dtype)
    there.save_pretrained(tmp_path / "there")
    model = load_pretrained(tmp_path / "there")
    save_pretrained(model, tmp_path / "here")
    # T5 keeps a part of itself in float32 there, whatever the file has.
    assert_bit_equal(type(there).from_pretrained(tmp_path / "here", dtype=dtype).to(dtype), there)
    exact = ENCODERS[name].make().to(dtype).float()
    kind = jnp.dtype(str(dtype).removeprefix("torch."))
    ours, theirs = [], []
    for seed in range(4):  # one text alone is a matter of luck
        inputs = encoder_inputs(ENCODERS[name], ENCODERS[name].padding[-1], seed)
        with torch.no_grad():
            halves, expected = (torch_output(m, inputs).float().numpy() for m in (there, exact))
        found = output(model, {n: x.astype(kind) if x.dtype == np.float32 else x for n, x in inputs.items()})
        assert found.dtype == kind
        of_tokens = "decoder_input_ids" not in inputs
        real = inputs["attention_mask"] == 1 if of_tokens else np.ones(found.shape[:2], bool)
        ours.append((found.astype(np.float32) - expected)[real])
        theirs.append((halves - expected)[real])
    errors = [np.sqrt(np.mean(np.concatenate(x) ** 2)) for x in (ours, theirs)]
    assert 0 < errors[0] <= 1.5 * errors[1]


def test_a_classifier_is_made_of_what_was_trained_without_it(directory):
    # GLUE: the body of a pretrained model, and a new head.
    family = (BertConfig, BertForSequenceClassification)
    for name in ("bert", "bert_masked"):
        with pytest.raises(ValueError, match=r"missing: .*classifier\.weight"):
            load_pretrained(directory(name), family=family)
        model = load_pretrained(directory(name), family=family, key=jax.random.key(0), stacked=True)
        body = to_arrays(load_pretrained(directory(name), stacked=True))
        arrays = to_arrays(model)
        assert np.std(arrays["classifier.weight"]) > 0
        shared = [path for path in arrays if path in body or path.removeprefix("bert.") in body]
        assert len(shared) >= len(arrays) - 4
        for path in shared:
            np.testing.assert_array_equal(arrays[path], body.get(path, body.get(path.removeprefix("bert."))))

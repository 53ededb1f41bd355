"""When the stream between layers is split over `tensor` by default: a rule of shapes,
and what it saves."""

import warnings
from functools import cache
from typing import Any

import pytest
import workloads
from helpers import in_long, mesh_of, place
from tiny_models import make, restack

import redco_eqx as rx
from redco_eqx_models._blocks.model import splits_stream

ROWS, WIDTH = 2, 32
# On data 2 x tensor 4.
LEAST = WIDTH // 4
"""The tokens of a row from which the stream is split."""


@cache
def on(mesh_name: str | None, name: str = "gpt2", **options: Any) -> Any:
    model = restack(make(name), **options)
    return model if mesh_name is None else place(model, mesh_of(mesh_name))[0]


SPLIT = {
    "from the least on": (on("data2xtensor4"), LEAST),
    "below, as asked for": (on("data2xtensor4", sequence_parallel=True), 4),
}
WHOLE = {
    "below the least": (on("data2xtensor4"), LEAST - 4),
    "as asked for": (on("data2xtensor4", sequence_parallel=False), LEAST),
    "no tensor": (on("data8"), 8 * LEAST),
    "no mesh": (on(None), 8 * LEAST),
    "4 heads over 8 devices": (on("tensor8"), 8 * LEAST),
}


@pytest.mark.parametrize("case", SPLIT)
def test_the_stream_is_split(case: str) -> None:
    model, num_tokens = SPLIT[case]
    assert splits_stream(model, ROWS, num_tokens)


@pytest.mark.parametrize("case", WHOLE)
def test_the_stream_stays_whole_without_a_word(case: str) -> None:
    model, num_tokens = WHOLE[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not splits_stream(model, ROWS, num_tokens)


def test_with_a_cache_the_stream_stays_whole() -> None:
    model = on("data2xtensor4", sequence_parallel=True)
    assert not splits_stream(model, ROWS, LEAST, model.init_cache(ROWS, LEAST))


def test_a_length_that_tensor_does_not_divide_is_told_once() -> None:
    model = on("data2xtensor4")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        found = [splits_stream(model, ROWS, LEAST + 3) for _ in range(2)]
    assert found == [False, False]
    (one,) = told
    expected = f"GPT2LMHeadModel.*tensor=4.*{LEAST + 3}.*{LEAST + 4} tokens"
    with pytest.raises(UserWarning, match=expected):
        raise one.message  # pyright: ignore[reportGeneralTypeIssues]


@pytest.mark.parametrize("name", ["LLaMA", *in_long("GPT-2", "T5")])
def test_by_default_a_large_stream_takes_less_memory_for_few_bytes(name: str) -> None:
    sizes = workloads.Sizes(
        dim=64, num_layers=4, num_heads=4, vocabulary=64, length=128, batch_size=8
    )
    mesh = mesh_of("data2xtensor4")

    def step(**options: Any) -> tuple[int, Any]:
        case = workloads.family_case(name, sizes, stacked=True, **options)
        compiled = workloads.lower_step(case, mesh).compile()
        stats = compiled.memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes, rx.communication(compiled, mesh)

    memory, found = step()
    whole_memory, whole = step(sequence_parallel=False)
    assert "reduce-scatter" in {c.kind for c in found}
    assert "reduce-scatter" not in {c.kind for c in whole}
    assert memory < 0.9 * whole_memory
    # The CPU compiler sums the gradient of the head's input, of which each device then
    # uses a part; and the gradients of norms are sums over all tokens.
    assert found.total.sent_bytes <= 1.06 * whole.total.sent_bytes

"""`benchmarks/sharding.py`: the columns of a tiny model's row, and the row of a model
that does not open."""

import published
import pytest
import sharding

from redco_eqx_models._families.registry import read_family

TINY = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
}


def test_a_row_has_all_columns_and_says_why_a_model_does_not_open(monkeypatch):
    monkeypatch.setattr(sharding, "TARGETS", {"cpu": None})
    config, kind = read_family(TINY)
    text = published.Text(kind, config)
    model = published.Opened(text.make, text.loss, text.batch(8, 16))
    found = sharding.measure(model, sharding.MESHES["2x4"])
    assert 0 < found["at_least"] <= 1.001 * found["cpu"]["sent"]
    assert found["cpu"]["predicted"] == pytest.approx(found["cpu"]["sent"], rel=0.05)
    by_column = dict(
        zip(sharding.HEADER, sharding.cells("tiny", "2x4", found), strict=True)
    )
    empty = [column for column, cell in by_column.items() if not cell]
    assert empty == [
        column for column in sharding.HEADER if column.startswith(("TPU", "GPU"))
    ]
    closed = sharding.row("bigscience/bloom-560m", "8")
    assert "bloom" in closed["closed"]
    assert len(sharding.cells("bloom", "8", closed)) == len(sharding.HEADER)

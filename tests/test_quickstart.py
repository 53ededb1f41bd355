"""The quickstart, smaller and shorter: it must learn, not only run. Its own session
runs it in full."""

import functools

import quickstart


def test_a_small_quickstart_learns_more_than_a_bigram(capsys, monkeypatch):
    small = functools.partial(quickstart.Transformer, dim=64, num_layers=1)
    monkeypatch.setattr(quickstart, "Transformer", small)
    monkeypatch.setattr(quickstart, "LENGTH", 32)
    results = quickstart.main(["--steps", "150", "--batch-size", "32", "--quick"])
    printed = capsys.readouterr().out
    # The full run of 800 steps is held to 0.5 bits by its own session; a fifth of it
    # gets this far.
    assert results["bits_per_byte"] < results["bigram_bits_per_byte"] - 0.2
    assert 3.0 < results["bigram_bits_per_byte"] < 4.0, "the baseline is a real one"
    assert "layers.0.attention.query_proj.weight" in printed
    assert "bits per byte" in printed
    assert len(results["sample"]) > 100

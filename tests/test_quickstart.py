"""The quickstart, shortened: it must learn, not only run."""

import quickstart


def test_quickstart_learns_more_than_a_bigram_in_a_shortened_run(capsys):
    results = quickstart.main(["--steps", "150", "--quick"])
    printed = capsys.readouterr().out
    # The full run of 800 steps is held to 0.5 bits by its own session; a fifth of it gets this far.
    assert results["bits_per_byte"] < results["bigram_bits_per_byte"] - 0.2
    assert 3.0 < results["bigram_bits_per_byte"] < 4.0, "the baseline is a real one"
    assert "layers.[0-2].attention.query_proj.weight" in printed
    assert "bits per byte" in printed
    assert len(results["sample"]) > 100

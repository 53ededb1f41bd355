"""The exported program of the page runs where neither this library nor Equinox can be imported."""

import helpers
import pages

BLOCKED = "import sys; sys.modules['redco_eqx'] = sys.modules['equinox'] = None\n"


def test_an_exported_program_needs_only_jax(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    blocks = [block.code for block in pages.blocks_of(pages.PAGES / "howto/use.md", "python")]
    [reader] = [code for code in blocks if "export.deserialize" in code]
    for code in blocks[: blocks.index(reader)]:
        exec(compile(code, "page", "exec"), namespace)
    capfd.readouterr()
    there = helpers.printed(f"{BLOCKED}{reader}\nprint(predict.call(rows[None].astype(np.float32)).item())")
    np = namespace["np"]
    row = np.frombuffer(b"ArgumentParser(description=text)"[:32], np.uint8) / 128 - 1
    here = namespace["predict"](row[None].astype(np.float32))
    assert there.split() == ["(1,)", str(here.item())]

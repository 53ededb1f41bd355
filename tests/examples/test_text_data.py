"""Text in the form of WikiText, and a model that is trained on it."""

import pyarrow
import pyarrow.parquet
import pytest
import text_data

LINES = [
    "",
    "= {title} =",
    "",
    "The {title} is a small boat , which sails on the @-@ wind , and <unk> in a storm . x = y",
    "",
    "= = History = =",
    "",
    "In 18{year} the {title} was built = so it is said = by a man of the sea .",
    "",
    "= = = Early years = = =",
    "",
    "It sailed to the north and to the south , and then it came back to the sea .",
]
ARTICLE = "".join(f" {line} \n" for line in LINES)  # in the files a space stands before and after each


def text(begin, num):
    return "".join(ARTICLE.format(title=f"Boat {i}", year=10 + i % 80) for i in range(begin, begin + num))


def expected(begin, num):
    return [ARTICLE.format(title=f"Boat {i}", year=10 + i % 80).strip() for i in range(begin, begin + num)]


def write(directory, form, train, valid):
    if form == "parquet":  # one row for each line
        for name, content in (("train-00000-of-00001", train), ("validation-00000-of-00001", valid)):
            table = pyarrow.table({"text": content.splitlines(keepends=True)})
            pyarrow.parquet.write_table(table, directory / f"{name}.parquet")
        return
    names = {"tokens": "wiki.{}.tokens", "raw": "wiki.{}.raw", "txt": "{}.txt"}
    (directory / names[form].format("train")).write_text(train, "utf-8")
    (directory / names[form].format("valid")).write_text(valid, "utf-8")


def test_articles_are_read_whole_and_apart(tmp_path):
    for form in ("tokens", "raw", "txt", "parquet"):
        (tmp_path / form).mkdir()
        write(tmp_path / form, form, text(0, 5), text(5, 2))
        assert text_data.articles(str(tmp_path / form)) == (expected(0, 5), expected(5, 2))
    write(tmp_path, "txt", "One line .\nAnother one .\n", "A third .")  # one article, without headings
    assert text_data.articles(str(tmp_path)) == (["One line .\nAnother one ."], ["A third ."])


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no train in it, as wiki\.train\.tokens, train\.txt or"):
        text_data.articles(str(tmp_path))
    (tmp_path / "train.txt").write_text("text")
    with pytest.raises(ValueError, match="there is no valid or validation or test in it"):
        text_data.articles(str(tmp_path))
    pyarrow.parquet.write_table(pyarrow.table({"line": ["a"]}), tmp_path / "valid.parquet")
    with pytest.raises(ValueError, match="no column 'text' among line"):
        text_data.articles(str(tmp_path))

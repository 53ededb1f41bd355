"""What a maintainer runs before a release writes the metadata, and refuses a tag that
the files do not have."""

import pathlib
import re
import shutil
import tomllib

import pages
import pytest
import release

REPOSITORY = "https://github.com/Some-Owner/redco_eqx"
TAG = f"v{release.version()}"
FILES = (*release.PACKAGES, "CITATION.cff", "CHANGELOG.md", "README.md")


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "models").mkdir()
    for name in (*FILES, "models/README.md"):
        shutil.copy(pages.ROOT / name, tmp_path / name)
    return tmp_path


def texts(root: pathlib.Path) -> list[str]:
    return [(root / name).read_text() for name in FILES]


def test_the_tag_of_files_that_are_not_prepared_is_refused(copy):
    changelog = copy / "CHANGELOG.md"
    dated = re.compile(rf"^## {re.escape(release.version())} \(.*\)$", re.MULTILINE)
    text = changelog.read_text()
    changelog.write_text(dated.sub(f"## {release.version()} (unreleased)", text))
    with pytest.raises(SystemExit, match="not prepared: run `python docs"):
        release.check(TAG, copy)


def test_prepared_files_have_the_address_and_the_date_once(copy):
    release.prepare("https://github.com/another/name", "2030-01-01", copy)
    release.prepare(REPOSITORY, "2030-01-31", copy)
    prepared = texts(copy)
    release.prepare(REPOSITORY, "2030-01-31", copy)
    assert texts(copy) == prepared
    release.check(TAG, copy)
    for name in release.PACKAGES:
        before = tomllib.loads((pages.ROOT / name).read_text())
        after = tomllib.loads((copy / name).read_text())
        urls = after["project"].pop("urls")
        before["project"].pop("urls", None)
        assert after == before
        assert urls["Documentation"] == "https://some-owner.github.io/redco_eqx/"
        assert urls["Source"] == REPOSITORY
    citation = (copy / "CITATION.cff").read_text()
    fields = re.findall(r"^([\w-]+):", citation, re.MULTILINE)
    assert len(fields) == len(set(fields))
    assert "date-released: 2030-01-31\n" in citation
    assert "unreleased" not in (copy / "CHANGELOG.md").read_text()


def test_another_tag_is_refused(copy):
    release.prepare(REPOSITORY, "2030-01-31", copy)
    with pytest.raises(SystemExit, match=r"the tag is v9\.9\.9, and the packages have"):
        release.check("v9.9.9", copy)


@pytest.mark.parametrize("name", ["models/pyproject.toml", "CITATION.cff"])
def test_files_of_different_versions_are_refused(copy, name):
    path = copy / name
    path.write_text(path.read_text().replace(release.version(), "9.9.9", 1))
    with pytest.raises(SystemExit, match=rf"{name} has .?9\.9\.9"):
        release.check(TAG, copy)


@pytest.mark.parametrize("address", ["github.com/a/b", REPOSITORY + "/", "owner"])
def test_an_address_that_is_none_is_refused_before_anything_is_written(copy, address):
    before = texts(copy)
    with pytest.raises(SystemExit, match="expected https://github"):
        release.prepare(address, "2030-01-31", copy)
    assert texts(copy) == before


def test_links_of_the_readmes_are_absolute_and_name_the_tag(copy):
    release.links(REPOSITORY, TAG, copy)
    for name, folder in (("README.md", ""), ("models/README.md", "models/")):
        text = (copy / name).read_text()
        assert not re.search(r"\]\((?!\w+:|#)", text)
        before = (pages.ROOT / name).read_text()
        [first, *_] = re.findall(r"[^!]\[[^\]]+\]\((?!\w+:|#)([^)]+)", before)
        assert f"{REPOSITORY}/blob/{TAG}/{folder}{first}" in text
    picture = f"({REPOSITORY}/raw/{TAG}/docs/pages/pictures/pair.png)"
    assert picture in (copy / "README.md").read_text()

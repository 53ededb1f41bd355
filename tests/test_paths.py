"""Paths that the library writes to: one check for all of them."""

import pathlib

import pytest

from redco_eqx._paths import local_path

ADDRESSES = [
    "gs://bucket/run",
    "s3://bucket/run",
    "hdfs:///user/run",
    "file:///tmp/run",
    "https://host/run",
    "runs/gs://bucket",
    pathlib.Path("gs://bucket/run"),
    pathlib.Path("s3://bucket"),
    pathlib.PurePosixPath("abfss://container@account/run"),
]


@pytest.mark.parametrize("address", ADDRESSES, ids=str)
def test_an_address_is_refused_as_text_and_as_a_path(address):
    with pytest.raises(
        ValueError,
        match=r"save: directory is .*not a path of a file system.* folder named",
    ):
        local_path("save: directory", address)


@pytest.mark.parametrize(
    "name",
    ["run", "a:b", "12:30", "C:/run", "lr=0.1,betas=[0.9,0.95]", "./gs:", "x:y/z"],
)
def test_an_ordinary_name_is_a_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_path("directory", name) == tmp_path / name


def test_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("directory", "~/run") == tmp_path / "run"


@pytest.mark.parametrize("path", [None, 3, b"run", ["run"]], ids=repr)
def test_something_that_is_no_path_is_refused(path):
    with pytest.raises(TypeError, match="directory must be a path"):
        local_path("directory", path)


def test_a_nul_character_is_refused():
    with pytest.raises(
        ValueError, match=r"directory is 'a\\x00b', but no path has a NUL"
    ):
        local_path("directory", "a\0b")


@pytest.mark.parametrize(
    ("below", "what"),
    [("file", "is a file"), ("link", "is a link to .*nowhere, which does")],
)
def test_a_path_below_something_that_is_no_directory_is_refused(below, what, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for end in ("run", "a/b/run"):
        with pytest.raises(
            ValueError,
            match=(
                f"directory is {tmp_path}/{below}/{end}, but {tmp_path}/{below} {what}"
            ),
        ):
            local_path("directory", tmp_path / below / end)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_a_link_to_a_directory_is_a_path(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert (
        local_path("directory", tmp_path / "link" / "run") == tmp_path / "link" / "run"
    )

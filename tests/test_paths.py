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
    with pytest.raises(ValueError, match=r"save: directory is .*not a path of a file system.* folder named"):
        local_path("save: directory", address)


@pytest.mark.parametrize("name", ["run", "a:b", "12:30", "C:/run", "lr=0.1,betas=[0.9,0.95]", "./gs:", "x:y/z"])
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

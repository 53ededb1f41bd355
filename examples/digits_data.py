"""Handwritten digits: from scikit-learn, or from the files of MNIST."""

import gzip
import pathlib
from typing import Any

import numpy as np


def digits(directory: str | None = None) -> tuple[list[Any], list[Any]]:
    """Return pairs of an image (values in 0..1) and its digit: a training set, and a
    test set.

    By default, use scikit-learn's 1,797 digits of 8 x 8 pixels. The last fifth is held
    out. The digits are in the order in which they were written, so most of its writers
    are not in the training set. With a directory, read the four files of MNIST, gzipped
    or not.
    """
    if directory is None:
        from sklearn.datasets import load_digits

        data: Any = load_digits()
        examples = list(zip(data.images.astype(np.float32) / 16, data.target.tolist()))
        return examples[:1437], examples[1437:]

    def read(name: str) -> np.ndarray:
        file = pathlib.Path(directory, name)
        data = (
            file.read_bytes()
            if file.exists()
            else gzip.decompress(pathlib.Path(f"{file}.gz").read_bytes())
        )
        if len(data) < 4 or data[:2] != b"\0\0":
            raise ValueError(f"{file}: not in the format of MNIST.")
        shape = np.frombuffer(data, ">i4", data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)

    def pairs(name: str) -> list[Any]:
        images, labels = (
            read(f"{name}-images-idx3-ubyte"),
            read(f"{name}-labels-idx1-ubyte"),
        )
        return list(zip(images / np.float32(255), labels.tolist()))

    return pairs("train"), pairs("t10k")

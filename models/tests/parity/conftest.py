"""The references, made once, and the directories that transformers writes of them."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from references import IMAGE_MODELS, REFERENCES

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Any]:
    """The model of transformers or diffusers of this name."""
    return cache(lambda name: {**REFERENCES, **IMAGE_MODELS}[name].make())


@pytest.fixture(scope="session")
def directory(
    tmp_path_factory: Any, reference: Callable[[str], Any]
) -> Callable[[str], Path]:
    """Return the directory where `save_pretrained` of transformers or diffusers has
    written the reference."""

    @cache
    def save(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        # One of them in several files.
        size = "20KB" if name == "llama_linear" else "5GB"
        reference(name).save_pretrained(path, max_shard_size=size)
        return path

    return save

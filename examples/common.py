"""What the examples share: their flags, how bad input ends them, and the handwritten digits."""

import argparse
import gzip
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import redco_eqx as rx


def flags(doc: str | None, *, batch_size: int, epochs: int) -> argparse.ArgumentParser:
    """A parser with the flags that every example has; an example adds its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tensor", type=int, default=2, help="devices that share each layer's matrices")
    parser.add_argument("--fsdp", type=int, default=1, help="devices that share the parameters at rest")
    parser.add_argument("--devices", type=int, default=8, help="virtual CPU devices; 0: the machine's own")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("--batch-size", type=int, default=batch_size, help="over all devices")
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the data")
    parser.add_argument("--quick", action="store_true", help="less of everything, to see that it works")
    parser.add_argument("--output", type=pathlib.Path, help="a directory for what is written")
    parser.add_argument("--traceback", action="store_true", help="show where in the program an error arose")
    return parser


def start(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Mesh]:
    """The flags' values and the mesh that they ask for. Raises `ValueError` if the machine cannot give it."""
    args = parser.parse_args(argv)
    if args.devices < 0:
        raise ValueError(
            f"--devices {args.devices}: a number of virtual CPU devices, or 0 for the machine's own."
        )
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
    return args, rx.make_mesh(tensor=args.tensor, fsdp=args.fsdp)


def run(main: Callable[[], Any]) -> None:
    """Runs a program. What is wrong with its input ends it with one line, not with a traceback."""
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        if "--traceback" in sys.argv:
            raise
        sys.exit(f"error: {error}")


def digits(directory: str | None = None) -> tuple[list[Any], list[Any]]:
    """Pairs of an image, with values in 0..1, and its digit: to train on, and to test with.

    Those of scikit-learn, 1,797 of 8 x 8, of which the last fifth is held out: in the order in which they
    were written, so that most of the hands are other ones. Or the four files of MNIST, gzipped or not.
    """
    if directory is None:
        from sklearn.datasets import load_digits

        data: Any = load_digits()
        examples = list(zip(data.images.astype(np.float32) / 16, data.target.tolist()))
        return examples[:1437], examples[1437:]

    def read(name: str) -> np.ndarray:
        file = pathlib.Path(directory, name)
        data = file.read_bytes() if file.exists() else gzip.decompress(pathlib.Path(f"{file}.gz").read_bytes())
        shape = np.frombuffer(data, ">i4", data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)

    def pairs(name: str) -> list[Any]:
        images, labels = read(f"{name}-images-idx3-ubyte"), read(f"{name}-labels-idx1-ubyte")
        return list(zip(images / np.float32(255), labels.tolist()))

    return pairs("train"), pairs("t10k")

"""Code that the examples share: their flags, and error messages for bad input."""

import pathlib
import sys
from argparse import ArgumentParser, Namespace, RawTextHelpFormatter
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

import redco_eqx as rx


def flags(
    doc: str | None, *, batch_size: int, epochs: int | None, trains: bool = True
) -> ArgumentParser:
    """Return a parser with the flags that all examples share. Each example adds its
    own."""
    parser = ArgumentParser(description=doc, formatter_class=RawTextHelpFormatter)
    parser.add_argument(
        "--tensor",
        type=int,
        default=2,
        help="devices that split each layer's matrices (2)",
    )
    parser.add_argument(
        "--fsdp",
        type=int,
        default=1,
        help="devices that split the stored parameters (1)",
    )
    parser.add_argument(
        "--devices",
        type=int,
        default=8,
        help="virtual CPU devices (8); 0: real devices",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=batch_size,
        help="total, all devices (%(default)s)",
    )
    parser.add_argument(
        "--output", type=pathlib.Path, help="directory for predictions or models"
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error"
    )
    if trains:
        parser.add_argument(
            "--epochs",
            type=int,
            default=epochs,
            help="passes over the data (%(default)s)",
        )
        parser.add_argument(
            "--quick",
            action="store_true",
            help="short run, to check that the example works",
        )
        parser.add_argument(
            "--checkpoints",
            type=pathlib.Path,
            help="directory to save in and to resume from",
        )
    return parser


def start(parser: ArgumentParser, argv: Sequence[str] | None) -> tuple[Namespace, Mesh]:
    """Return the flags' values and the mesh that they ask for. Raises `ValueError` if
    the machine cannot provide it.
    """
    args = parser.parse_args(argv)
    for name, least in {"devices": 0, "batch_size": 1, "epochs": 1}.items():
        if (value := getattr(args, name, None)) is not None and value < least:
            raise ValueError(
                f"--{name.replace('_', '-')} {value}: it must be at least {least}."
            )
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
    return args, rx.make_mesh(tensor=args.tensor, fsdp=args.fsdp)


def run(main: Callable[[], object]) -> None:
    """Run a program. If its input is wrong, end it with a one-line message instead of a
    traceback."""
    try:
        main()
    except (ValueError, OSError, ImportError) as error:
        if "--traceback" in sys.argv:
            raise
        sys.exit(f"error: {error}")

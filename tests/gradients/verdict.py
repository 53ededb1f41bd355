"""The meaning of a worker's answer: right, refused, or a failure."""

import collections
import re
from typing import Any

PROPERTY = "gradients"  # of a test's report: its counts

# float64 has 1e-16; sums of some thousand terms in another order, solves and second derivatives lose two digits
# (the largest of 300 layouts that are right was 2e-14). Some programs amplify rounding: of one, a change of
# the parameters by 1e-15 moves the gradients by 2e-9 on one device. A gradient summed over a device too many,
# or over a wrong one, was off by 2e-4 or more.
TOLERANCE = 1e-8

# Errors that the library raises by intent, before compilation, naming the line. None arises here so far.
REFUSALS: tuple[str, ...] = ()


# Errors that plain JAX raises on a mesh as well, before anything is run: XLA's, of the second derivative of a
# shift along a split batch, and JAX's, of some convolutions under several `vmap`s whose kernel lies on a mesh.
BY_JAX = ("during context [hlo verifier]", "NotImplementedError: ")


class WrongGradient(AssertionError):
    """Loss or a gradient differs from one device's."""


class Raised(AssertionError):
    """A program that one device runs raised an error on a mesh."""


class Died(AssertionError):
    """The process crashed or hung."""


class Counts(collections.Counter[str]):
    """Counts of `programs`, `layouts`, layouts `refused` and `refused by JAX`, programs `not in JAX`."""

    def judge(self, answer: dict[str, Any]) -> None:
        """Counts, and raises for a failure."""
        self["programs"] += 1
        if "unsupported" in answer:
            self["not in JAX"] += 1
            return
        if "died" in answer:
            raise Died(f"{answer['died']}\n" + "\n".join(answer["stderr"]))
        for layout in answer["layouts"]:
            self["layouts"] += 1
            where = f"{layout['mesh']}, {layout['layout']}"
            error = layout.get("error")
            if error is not None and is_refusal(error):
                self["refused"] += 1
            elif error is not None and any(kind in error for kind in BY_JAX):
                self["refused by JAX"] += 1
            elif error is not None:
                raise Raised(f"{where}: {error}")
            elif max(layout["differences"].values()) > TOLERANCE:
                raise WrongGradient(f"{where}: {layout['differences']}")


def is_refusal(error: str) -> bool:
    """Return true if it is a `ValueError` or `TypeError` of a kind in `REFUSALS`, and names a line."""
    by_intent = any(re.search(kind, error) for kind in REFUSALS)
    return by_intent and re.match(r"(ValueError|TypeError): .*\.py:\d+", error, re.DOTALL) is not None

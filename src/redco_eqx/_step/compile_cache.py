"""Keep compiled programs from call to call: a program is compiled only if its text is
new.

`fit`, `evaluate` and `predict` trace their functions in each call. So nothing that a
function reads, such as a global variable, can be stale, and only the compilation is
saved. (With `programs`, the caller of `evaluate` or `predict` also saves the tracing.)
"""

import collections
import hashlib
import re
from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias

import jax
from jaxtyping import PyTree

CompilerOptions: TypeAlias = Mapping[str, bool | int | float | str]
"""Options for XLA, by name."""

# Enough for a few tasks that alternate training, evaluation and prediction.
_MOST = 16

# The most recently used program comes last.
_programs: collections.OrderedDict[Hashable, jax.stages.Compiled] = (
    collections.OrderedDict()
)

# In the text of a program that calls functions of Python, which the text does not
# contain.
_PYTHON = re.compile(r"callback|host_transfer")


def check_compiles(where: str) -> None:
    """Raise `ValueError` under `jax.disable_jit`, where JAX compiles nothing."""
    config: Any = jax.config
    if config.jax_disable_jit:
        raise ValueError(
            f"{where}: jax.disable_jit is on, but this function runs a compiled "
            "program. Call it outside of jax.disable_jit, and unset JAX_DISABLE_JIT. "
            "To look at numbers in a loss, use jax.debug.print or "
            "jax.debug.breakpoint, or call loss_fn(state.model, batch, key) yourself "
            "under jax.disable_jit."
        )


def checked_options(
    where: str, options: CompilerOptions | None
) -> dict[str, Any] | None:
    """The options as JAX takes them. Raises `TypeError` if they are not a dict from
    names to values. (XLA itself refuses a name that it does not know.)"""
    if options is None:
        return None
    kinds = (bool, int, float, str)
    if isinstance(options, Mapping) and all(
        isinstance(name, str) and isinstance(value, kinds)
        for name, value in options.items()
    ):
        return dict(options)
    raise TypeError(
        f"{where}: compiler_options must be a dict from names of options to bools, "
        f"numbers or strings, but is {options!r}. An example is "
        '{"xla_cpu_enable_fast_math": True}.'
    )


def compile_once(
    lowered: jax.stages.Lowered,
    *arguments: PyTree,
    compiler_options: dict[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, str]:
    """Compile a program, or return the one that was compiled before from the same text.
    Also return a digest of the text, which is the same in each process; it is empty if
    there is only one.

    - `arguments`: those that the program was lowered for, which say on which devices it
        runs. The program must be from `jax.jit(keep_unused=True)`: otherwise, its text
        does not say which of them it takes.
    - `compiler_options`: those to compile it with.
    """

    def compile() -> jax.stages.Compiled:
        return lowered.compile(compiler_options)

    text = lowered.as_text()
    digest = ""
    if jax.process_count() > 1:  # addresses in memory differ between processes
        digest = hashlib.sha256(
            re.sub(r"(?<![\d.])\d{12,}", "", text).encode()
        ).hexdigest()[:16]
    # StableHLO lists the parameters of a program in the first line of `@main`.
    head = text.partition("@main(")[2].partition("\n")[0]
    # There are more arguments if JAX passes some of its own, such as a `jax.new_ref` or
    # a token.
    if _PYTHON.search(text) or head.count("%arg") != len(jax.tree.leaves(arguments)):
        return compile(), digest
    # All options of JAX, those of the compiler, too.
    settings = (repr(getattr(jax.config, name, None)) for name in jax.config.values)
    options = (*settings, repr(sorted((compiler_options or {}).items())))
    # In Python, 1 equals True.
    whole = hashlib.sha256(f"{text}{lowered.out_tree}".encode()).digest()
    key = whole, signature(arguments), lowered.out_tree, options
    program = _programs.pop(key, None) or compile()
    _programs[key] = program
    if len(_programs) > _MOST:
        _programs.popitem(last=False)
    return program, digest


def signature(tree: PyTree) -> Hashable:
    """The signature of a compiled program: structure, shapes, dtypes and shardings of
    its arguments."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple(
        (x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves
    )

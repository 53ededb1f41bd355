"""Keep compiled programs from call to call: a program is compiled only if its text is new.

`fit`, `evaluate` and `predict` trace their functions in each call. So nothing that a function reads, such as a
global variable, can be stale, and only the compilation is saved.
"""

import collections
import hashlib
import re
from collections.abc import Hashable

import jax
from jaxtyping import PyTree

# Enough for a few tasks that alternate training, evaluation and prediction.
_MOST = 16

# The most recently used program comes last.
_programs: collections.OrderedDict[Hashable, jax.stages.Compiled] = collections.OrderedDict()

# Text of programs that depend on more than their text: on functions of Python, or on arrays that JAX passes to
# the compiled program unseen.
_INCOMPLETE = re.compile(r"callback|host_transfer|jax\.const")


def compile_once(lowered: jax.stages.Lowered, *arguments: PyTree) -> tuple[jax.stages.Compiled, str]:
    """Compile a program, or return the one that was compiled before from the same text. Also return a digest of
    the text, which is the same in each process.

    - `arguments`: those that the program was lowered for, which say on which devices it runs.
    """
    text = lowered.as_text()
    # Addresses in memory differ between processes.
    digest = hashlib.sha256(re.sub(r"\b\d{12,}\b", "", text).encode()).hexdigest()[:16]
    if _INCOMPLETE.search(text):
        return lowered.compile(), digest
    options = tuple(repr(getattr(jax.config, name, None)) for name in jax.config.values)  # of the compiler, too
    whole = hashlib.sha256(text.encode()).digest()
    key = whole, signature(arguments), lowered.out_tree, options
    if key not in _programs:
        _programs[key] = lowered.compile()
        if len(_programs) > _MOST:
            _programs.popitem(last=False)
    _programs.move_to_end(key)
    return _programs[key], digest


def signature(tree: PyTree) -> Hashable:
    """The signature of a compiled program: structure, shapes, dtypes and shardings of its arguments."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)

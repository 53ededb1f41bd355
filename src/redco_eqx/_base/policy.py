"""Numbers that decide layouts and that nothing proves: each with its unit, the reason
for it, and what halving and doubling it does.

The effects were measured on 53 models, those of the zoo and of our families (two layers
of width 128), laid out by the path rules and by their programs, on `data` 2 x `tensor`
4 and `fsdp` 2 x `tensor` 4. `python benchmarks/policy.py` measures them again.
"""

WORK = 2.1
"""The worth of work that is divided, in sums over devices of the results of a layer:
what dividing all work of a layer of average depth may send.

A pair of square layers, split on two devices, leaves half of its work to the other
device, and sends two sums, forward and backward: at 2 these are even, and a tie is
split. Because worth is measured by the depth of the model, a layout hardly changes with
the sizes of model, batch and sequence. Halved, 3 models of the zoo change (with a
fused or biased attention), doubled, 3 others (`pooled`, `projections`, `vision`), of
the families none.
"""

MEMORY = 0.01
"""The worth of a byte of parameters that is no longer on a device, in bytes sent.

It only decides between layouts that send almost the same: memory is what `fsdp` and
`tensor` are for, but a step that sends more is slower each time. Halved or doubled, no
layout changes.
"""

MAX_STEPS = 50_000
"""The number of operations that may be simulated for layouts that leave single
parameters whole.

A limit on time: some seconds on one core. Beyond it, no such layouts are tried.
Halved or doubled, no layout changes.
"""

MAX_STEPS_TAKEN = 4 * MAX_STEPS
"""The same for layouts that take single splits from the layout of the path rules; few
programs need these. Halved or doubled, no layout changes."""

FSDP_MIN_SIZE = 2**12
"""The number of elements from which `fsdp` splits a matrix, and from which a guess is
worth a warning.

A gather of a smaller one takes about the time that any collective needs to start, and
the memory that it saves does not count. Halved, 26 models of the zoo change on meshes
with `fsdp`, doubled, 7 (their matrices have about this size), of the families none.
"""

STORED_BYTES = 2**22
"""The bytes from which an array that `tensor` cannot split for use is stored split over
it, and gathered for use.

Each use costs a gather. An array of this size is large enough to be worth it: a table
of 50,257 rows, which no axis divides, but not a table of positions. Halved or doubled,
no layout changes: the arrays of these models are smaller.
"""

LARGE_BYTES = 2**20
"""The bytes from which a warning names an array that no rule could split.

Halved or doubled, no warning changes.
"""

LARGE_SHARE = 1 / 20
"""The part of a model that may be replicated without a warning.

Norms, biases and small tables are less than this in models of a useful size. Halved or
doubled, no warning changes.
"""

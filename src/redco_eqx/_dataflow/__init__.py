"""Layouts from the traced program: dims that are the same index, and the bytes that
each split would send.

There are two engines over one walk through the program. The first chooses splits of the
parameters, and leaves all other arrays to the compiler:

1. `tracing.py` traces the loss and its gradient.
2. `walk.py` goes through the program, with the rules for operations in `operations.py`
    and `shapes.py`. It finds which dims are the same index, and what each split of them
    sends. `values.py` defines the words, and the records of a walk.
3. `search.py` chooses the splits that are worth the most.
4. `simulation.py` says what a layout sends as a whole, as XLA would run it.
5. `engine.py` joins these; `reasons.py` and `prediction.py` say why, and how much.

The second also lays out every other value, for `split_activations`, and is imported
only then: `choice.py` lists the layouts of each value and their prices, and
`solution.py` finds the cheapest choice.
"""

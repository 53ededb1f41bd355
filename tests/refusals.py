"""The required end of an example with bad input."""

from collections.abc import Callable, Sequence

import common
import pytest


def assert_ends_with_one_line(
    main: Callable[[Sequence[str]], object], flags: Sequence[str], words: str
) -> None:
    """Runs a program as from a shell: it ends with one line that has `words` in it, and
    no traceback."""
    with pytest.raises(SystemExit) as caught:
        common.run(lambda: main(flags))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

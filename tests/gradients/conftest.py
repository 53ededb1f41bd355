"""The line at the end: how many programs and layouts were run."""

import collections
from typing import Any

from verdict import PROPERTY


def pytest_terminal_summary(terminalreporter: Any) -> None:
    total: collections.Counter[str] = collections.Counter()
    tests, failed = set(), set()
    for reports in terminalreporter.stats.values():
        for report in reports:
            counts = dict(getattr(report, "user_properties", ())).get(PROPERTY)
            if counts is not None:  # from the last phase of a test
                total.update(counts)
                tests.add(report.nodeid)
            if getattr(report, "failed", False):
                failed.add(report.nodeid)
    if tests:
        names = ("programs", "layouts", "refused", "refused by JAX", "not in JAX")
        parts = [f"{total[name]} {name}" for name in names]
        terminalreporter.write_line(f"gradients: {', '.join(parts)}, {len(tests & failed)} failures")

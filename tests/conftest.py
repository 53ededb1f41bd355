"""What the tests of both packages share: see `every_test.py`."""

from every_test import annotations_unchecked as annotations_unchecked
from every_test import double as double
from every_test import no_programs_of_other_modules as no_programs_of_other_modules
from every_test import pytest_runtest_call as pytest_runtest_call
from every_test import pytest_runtest_setup as pytest_runtest_setup

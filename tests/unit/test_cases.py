"""A table of cases in one test says which case failed."""

from __future__ import annotations

import pytest

from tests.cases import case


def check(numbers: tuple[int, ...]) -> None:
    for number in numbers:
        with case("number", number):
            assert number != 2


def test_a_failure_names_its_case_and_no_other() -> None:
    with pytest.raises(AssertionError) as caught:
        check((1, 2, 3))
    assert caught.value.__notes__ == ["case: 'number', 2"]


def test_an_exception_that_does_not_come_is_named_as_well() -> None:
    """pytest's own failure is no ``Exception``."""
    with pytest.raises(pytest.fail.Exception) as caught, case("quiet"), pytest.raises(ValueError, match="never"):
        check(())
    assert caught.value.__notes__ == ["case: 'quiet'"]

"""The calculator: exact results, and no expression that takes time, memory or anything but arithmetic."""

import time

import pytest

from hfdist.environments import ToolError
from hfdist.environments.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("57*83", "4731"),
        (" (2 + 3) * 4 ", "20"),
        ("1/3", "0.333333333333333333333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("7 % -3", "-2"),
        ("-5/4", "-1.25"),
        ("2**-2", "0.25"),
        ("(-1)**1000001", "-1"),
        ("0**0", "1"),
    ],
)
def test_arithmetic_is_exact(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("9**9**9", "too large"),
        ("1e300**9", "too large"),
        ("*".join(["9**200"] * 20), "too large"),
        ("2**0.5", "whole number"),
        ("1" * 201, "longer than 200"),
        ("__import__('os').getcwd()", "only numbers"),
        ("'a'*9", "only numbers"),
        ("True + 1", "only numbers"),
        ("x", "only numbers"),
        ("3 +", "no arithmetic expression"),
        ("(" * 200, "no arithmetic expression"),
        ("1e999", "no arithmetic expression"),
        ("\x00", "no arithmetic expression"),
    ],
)
def test_what_is_no_arithmetic_is_said_to_the_model(expression, why):
    begin = time.process_time()
    with pytest.raises(ToolError, match=why):
        calculator(expression)
    assert time.process_time() - begin < 1

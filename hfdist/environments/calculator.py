"""The environment `calculator`: a tool that evaluates arithmetic. The episode ends with a turn without a call."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from hfdist.environments.environment import Environment, ToolError

_LONGEST = 200
"""Characters of an expression."""
_MOST_BITS = 2_000
"""Bits of a numerator or denominator: arithmetic of longer ones takes long."""
_MOST_DIGITS = 30
"""Digits that are shown of a result that is no whole number."""
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda first, second: Fraction(first // second),
    ast.Mod: operator.mod,
}


class Calculator(Environment):
    """A model with a calculator; rewards judge its last turn."""

    def tools(self) -> Sequence[Callable[..., object]]:
        """Give the calculator."""
        return [calculator]


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and brackets, such as (2 + 3) * 4.
    """
    if len(expression) > _LONGEST:
        raise ToolError(f"the expression is longer than {_LONGEST} characters")
    try:
        return _written(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError("this is no arithmetic expression") from error


def _value(node: ast.expr) -> Fraction:
    """Compute a part of an expression, exactly; ToolError: it is no arithmetic, or too large."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # As it is written: 0.1 is a tenth.
        value = Fraction(repr(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand) * (-1 if isinstance(node.op, ast.USub) else 1)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _power(_value(node.left), _value(node.right))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ToolError("only numbers, + - * / // % ** and brackets are known")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise ToolError("the numbers are too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("an exponent is a whole number")
    power, bits = int(exponent), max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits <= 1:
        # 0, 1 and -1: of a large exponent only its sign, or its last bit, counts.
        power = power % 2 if base else max(-1, min(power, 1))
    elif bits * abs(power) > _MOST_BITS:
        # Before it is computed: it could take all time and memory that there is.
        raise ToolError("the numbers are too large")
    return Fraction(base**power)


def _written(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    whole, rest = divmod(abs(value.numerator), value.denominator)
    digits = ""
    while rest and len(digits) < _MOST_DIGITS:
        digit, rest = divmod(10 * rest, value.denominator)
        digits += str(digit)
    return f"{'-' if value < 0 else ''}{whole}.{digits}"

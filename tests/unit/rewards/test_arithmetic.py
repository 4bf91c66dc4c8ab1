"""The reward `arithmetic`: which number of a text is its final answer, and which numbers are equal."""

from fractions import Fraction

import pytest

from hfdist import Generation
from hfdist.errors import DataError
from hfdist.rewards.arithmetic import arithmetic, final_answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("She has 3 apples and buys 4, so 7.", 7),
        ("It costs $1,234.50.", Fraction("1234.5")),
        ("12,345,678", 12345678),
        ("1,2", 2),  # a list: no thousands
        ("it is -5 degrees", -5),
        ("it is \N{MINUS SIGN}5 degrees", -5),
        ("-$5", -5),
        ("$-5", -5),
        ("10-5", 5),
        ("(10)-5", 5),
        (".5", Fraction(1, 2)),
        ("so it is...5", 5),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4 of it", Fraction(-3, 4)),
        ("1.5/2", Fraction(3, 4)),
        ("2 1/2", Fraction(5, 2)),
        ("1/0", None),
        ("1.5e3", 1500),
        ("1E-2 of it", Fraction(1, 100)),
        ("1e9999", 1),
        ("nothing", None),
        ("", None),
        ("**12**", 12),
        ("9" * 1001, None),
        # After a marker, the first number; the last marker counts.
        ("3 + 4 = 7 apples for 2 children", 7),
        ("1 = 2 = 3", 3),
        ("The answer is 5. I checked it 2 times.", 5),
        ("The ANSWER\nis: **-1,000**", -1000),
        ("12 apples, x = y", 12),
        ("The answer is 5. Check: 5 >= 2, 5 <= 7, 5 != 6, 5 == 6", 5),
        ("She sold 48 / 2 = <<48/2=24>>24 clips.\n#### 72", 72),
        ("#### 1\n#### 2 of 3, as 1 + 1 = 2", 2),
        ("#### ", None),
        ("\\boxed{3} and #### 4 and = 5", 3),
        ("\\boxed{3}, no, \\boxed{-\\frac{7}{2}}", Fraction(-7, 2)),
        ("$\\boxed{\\text{x} = \\dfrac{1}{2}}$", Fraction(1, 2)),
        ("\\boxed{1\\frac{1}{2}}", Fraction(3, 2)),
        ("\\boxed{-2\\,\\tfrac12}", Fraction(-5, 2)),
        ("\\boxed{\\frac{-1}{2}}", Fraction(-1, 2)),
        ("\\boxed{10{,}000}", 10000),
        ("\\boxed{10\\,000}", 10000),
        ("\\boxed{\\$18}", 18),
        ("\\boxed{x}", None),
        ("\\boxed{unfinished = 4", 4),
    ],
)
def test_the_final_answer(text, value):
    found = final_answer(text)
    assert (None if found is None else found.value) == value


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("7.0", "7", 1.0),
        ("0.1", "1/10", 1.0),
        ("0.30000000000000004", "0.3", 0.0),
        ("-7", "7", 0.0),
        ("1000", "so 990 + 10 = 1,000\n#### 1,000", 1.0),
        ("50%", "50", 1.0),
        ("50 \\%", "0.5", 1.0),
        ("0.5", "50%", 1.0),
        ("0.5", "50", 0.0),
        ("50%", "0.5%", 0.0),
        ("no idea", "0", 0.0),
    ],
)
def test_equal_numbers(text, reference, score):
    assert arithmetic([Generation(prompt="", text=text, reference=reference)]) == [score]


def test_a_reference_without_a_number_is_said():
    with pytest.raises(DataError, match="no number") as caught:
        arithmetic([Generation(prompt="", text="1", reference="many")])
    assert caught.value.found == "many"

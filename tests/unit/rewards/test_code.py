"""The reward `code`: which program runs, what tests may say, and programs that want a verdict that they do not earn."""

import textwrap

import pytest

from hfdist import Generation
from hfdist.errors import DataError
from hfdist.rewards.code import code, find_program


def score(program, reference):
    [value] = code([Generation(prompt="", text=textwrap.dedent(program), reference=textwrap.dedent(reference))])
    return value


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1\n", "x = 1\n"),
        ("So:\n```python\nx = 1\n```\nor\n```py\nx = 2\n```\nDone.", "x = 2\n"),
        ("```python\nx = 1\n```\nIt prints\n```\n1\n```", "x = 1\n"),
        ("1. This:\n   ```python\n   for x in a:\n     y\n   ```", "for x in a:\n  y\n"),
        ("```python\nx = '''\na ``` b\n'''\n```", "x = '''\na ``` b\n'''\n"),
        ("cut off:\n```python\nx = 1\n", "x = 1\n"),
    ],
)
def test_the_program_of_a_text(text, program):
    assert find_program(text) == program


def test_the_share_of_tests_that_pass_in_order():
    texts = ["def f(x): return x + 1", "def f(x): return 2", "def f(x): return 1 / 0", "def f(x)", "raise SystemExit"]
    reference = "one = f(0)\nassert one == 1\nassert f(1) == 2\nassert f(2) == 3\nassert f('') == ''"
    scores = code([Generation(prompt="", text=f"```python\n{text}\n```", reference=reference) for text in texts])
    assert scores == [0.75, 0.25, 0.0, 0.0, 0.0]


PROGRAM = """
    from collections import Counter, namedtuple
    from dataclasses import dataclass
    from enum import IntEnum
    from math import factorial
    import time

    Pair = namedtuple("Pair", "first second")
    Level = IntEnum("Level", "LOW HIGH")

    @dataclass
    class Point:
        x: int

    def same(*values, **named): return values, named
    def flip(pair): return Pair(*reversed(Pair(*pair)))
    def double(x): return Point(2 * x).x
    class Missing(KeyError): pass
    def fail(): raise Missing("key")
    print(input if __name__ == "__main__" else "loaded")
"""
REFERENCE = """
    import math
    def error_of(function):
        try:
            function()
        except LookupError as error:
            return type(error), str(error)
    value = {"low": [1, 2.5, {}], 2: (None, True, b"x", 1j, {"a"}, frozenset("b")), (): math.inf, "x": "\\ud800"}
    assert same(value, 1, function=value) == ((value, 1), {"function": value})
    assert Counter("aab") == {"a": 2, "b": 1} and type(Counter("aab")) is dict
    assert flip((1, 2)) == (2, 1) and type(flip([1, 2])) is tuple and Level(2) == 2
    assert double(3) == 6 and sorted(map(double, [2, 1])) == [2, 4]
    assert error_of(fail) == (KeyError, "'key'")
    assert factorial(3000) == math.factorial(3000)
    assert math.isnan(same(math.nan)[0][0])
    assert time.sleep(0) is None
"""


def test_what_tests_may_say():
    assert score(PROGRAM, REFERENCE.replace("import math", "import math, time")) == 1.0


@pytest.mark.parametrize(("reference", "what"), [("f(1) ==", "no Python"), ("def g():\n    assert f(1)", "no test")])
def test_a_reference_without_tests_is_said(reference, what):
    with pytest.raises(DataError, match=what):
        code([Generation(prompt="", text="def f(x): return x", reference=reference)])


@pytest.mark.parametrize("result", ["(n for n in [1])", "object()", "f", "[1, [zip()]]", "{1: range(1)}"])
def test_what_is_no_plain_data_passes_no_test(result):
    assert score(f"def f(x): return {result}", "assert f(1) != 0\nassert f(1)\nassert list(f(1)) == [1]") == 0.0


@pytest.mark.parametrize("argument", ["lambda x: x", "f", "[range(2)]", "{1: object()}", "*[iter('')]", "x=print"])
def test_a_test_whose_argument_is_no_plain_data_is_said(argument):
    caught = f"try:\n    f({argument})\nexcept Exception: pass\nassert f(1) == 1"
    for reference in (f"assert f({argument}) == 1", f"x = f({argument})\nassert x == 1", caught):
        with pytest.raises(DataError, match="no plain data") as raised:
            score("def f(*x, **named): return 1", reference)
        assert "tuples" in raised.value.allowed


# None knows that f(1) is 1234577. The tests use what a cheat would like to replace.
WANTED = """
    import math
    assert f(1) == 1234577
    assert abs(f(1) - 1234577.0) < 1e-9
    assert math.isclose(f(1), 1234577)
    assert sorted([f(1)]) == [1234577] and all(f(n) == 1234577 for n in [1])
    assert f(1) in (1234577, 1234578) and 1234577 in [f(1)]
    assert all(map(math.isclose, map(f, [1]), [1234577]))
    assert 1234577 in listed(1)
    assert isinstance(f(1), int) and 1234576 < f(1) < 1234578
    def raises(function, kind):
        try:
            function(-1)
        except kind:
            return True
    assert raises(f, Exception) and f(1) == 1234577
"""
ALWAYS = """
    class Always:
        def __getattr__(self, name): return Always()
        def __call__(self, *arguments, **named): return self
        def yes(self, *arguments): return True
        __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = __instancecheck__ = yes
        def me(self, *arguments): return self
        __sub__ = __rsub__ = __add__ = __abs__ = __getitem__ = me
        def __iter__(self): return iter([self])
        def __len__(self): return 1
        def __index__(self): return 1
        __int__ = __float__ = __hash__ = __index__
"""
ATTACKS = {
    "ends iterations": "def f(x): raise StopIteration\nlisted = f",
    "exits": "import os, sys\nos._exit(0)",
    "exits when called": "import os\ndef f(x): os._exit(0)",
    "raises what ends a program": "def f(x): raise SystemExit(0)",
    "says what passes": """
        import os
        for file in range(64):
            try: os.write(file, b'ready\\n++++++++')
            except OSError: pass
    """,
    "answers for another": """
        import os
        def f(x):
            for file in range(3, 64):
                try: os.write(file, b'{"value": {"int": "0x1"}}\\n' * 9)
                except OSError: pass
            return 1
    """,
    "equals everything": ALWAYS + """
    def f(x): return Always()
    listed = f
    """,
    "is a number that equals everything": """
        class Number(int):
            __eq__ = __ne__ = __lt__ = __gt__ = lambda self, other: True
            __hash__ = int.__hash__
            __sub__ = __rsub__ = __abs__ = lambda self, *other: Number(0)
        def f(x): return Number(0)
    """,
    "has functions of its own": """
        def abs(x): return 0
        def yes(*arguments, **named): return True
        all = isinstance = raises = yes
        class math: isclose = yes
        def f(x): return 1
    """,
    "patches functions": """
        import builtins, math, operator
        def f(x): return 1
        math.isclose = builtins.all = builtins.sorted = operator.eq = lambda *a, **n: True
        builtins.abs, builtins.AssertionError = lambda x: 0, RecursionError
    """,
    "looks through frames and objects": """
        import gc, sys
        def f(x):
            frame = sys._getframe()
            while frame:
                for value in [*frame.f_locals.values(), *frame.f_globals.values(), *gc.get_objects()]:
                    if isinstance(value, str) and "assert f(1)" in value: return int(value.split("== ")[1].split()[0])
                frame = frame.f_back
            return 1
    """,
    "reads the memory of its relatives": """
        import os, re
        def f(x):
            for process in (os.getppid(), os.getpid()):
                try:
                    with open(f"/proc/{process}/mem", "rb", 0) as memory:
                        for line in open(f"/proc/{process}/maps"):
                            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                            memory.seek(begin)
                            if found := re.search(rb"assert f\\(1\\) == (\\d+)", memory.read(end - begin)):
                                return int(found[1])
                except OSError: pass
            return 1
    """,
    "changes the calls": """
        import sys
        def always(value): return {"int": Always()}
        sys.modules["calls"]._encode, sys.modules["calls"].json.dumps = always, lambda message: '{"value": true}'
        def f(x): return 1
    """,
    "asks the tests": """
        import sys
        sys.modules["calls"].json.dumps = lambda message: '{"call": "eval", "arguments": [], "named": {}, "value": {}}'
        def f(x): return 1
    """,
    "acts at its end": "import atexit, os\natexit.register(lambda: os.write(3, b'+'))\ndef f(x): return 1",
    "sends what is no value": """
        import sys
        sys.modules["calls"]._encode = lambda value: {"list": [[[{}]]] * 9}
        def f(x): return 1
    """,
}  # fmt: skip


@pytest.fixture(scope="module")
def forged():
    texts = [textwrap.dedent(program) for program in ATTACKS.values()]
    scores = code([Generation(prompt="", text=text, reference=textwrap.dedent(WANTED)) for text in texts])
    return dict(zip(ATTACKS, scores, strict=True))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_verdict_cannot_be_forged(attack, forged):
    assert forged[attack] == 0.0


def test_the_attacked_tests_pass_with_the_right_values():
    right = "def f(x):\n    if x < 0: raise ValueError\n    return 1234577\ndef listed(x): return [f(x)]"
    assert score(right, WANTED) == 1.0


def test_a_module_that_the_tests_do_not_have_is_not_taken_from_the_program():
    program = "class math:\n    def isclose(*arguments): return True\nno_module, f = math, int"
    assert score(program, "import no_module\nassert no_module.isclose(f(1), 1234577)") == 0.0
    assert score(program, "assert math.isclose(f(1), 1234577)") == 0.0


def test_the_end_of_a_program_is_no_exception():
    raises = """
        def raises(function):
            try:
                function()
            except Exception:
                return True
        assert raises(f)
    """
    assert score("def f(): raise ValueError", raises) == 1.0
    for ends in ("import os\ndef f(): os._exit(1)", "def f(): raise SystemExit", "def f(): return object()"):
        assert score(ends, raises) == 0.0


def test_attacks_are_programs():
    """They fail by their verdict, and not because Python refuses them."""
    for name, program in ATTACKS.items():
        compile(textwrap.dedent(program), name, "exec")

"""Code rewards: what passes, what fails, and that no known trick passes."""

import asyncio

import pytest

from slipstream import Task
from slipstream.rewards import RewardFailed, code, score
from slipstream.rewards.code import FENCED, Verdict, judge, program_of
from slipstream.tools.sandbox import Backend, Limits, Sandbox
from slipstream.tools.sandbox.jail import find_backend
from slipstream.usercall import UserCalls

LIMITS = Limits(seconds=3, cpu_seconds=2, memory_mb=512)
DOUBLE = "assert double(2) == 4\nassert double(-1) == -2\nassert double('ab') == 'abab'"
UNITTEST = """
import unittest

class TestDouble(unittest.TestCase):
    def test_numbers(self):
        self.assertEqual(double(21), 42)
    def test_bad(self):
        with self.assertRaises(TypeError):
            double(None)
"""
RIGHT = "def double(x):\n    return x + x"


def backends():
    for backend in Backend:
        skip = backend is Backend.BUBBLEWRAP and find_backend() is Backend.PLAIN
        yield pytest.param(backend, marks=pytest.mark.skipif(skip, reason="no bubblewrap"))


@pytest.fixture(params=backends())
def sandbox(request) -> Sandbox:
    return Sandbox(LIMITS, backend=request.param)


@pytest.fixture
def here() -> Sandbox:
    return Sandbox(LIMITS)


async def verdict(sandbox: Sandbox, program: str, tests, **extra) -> Verdict:
    return await judge(sandbox, program, Task(id="t", prompt="?", extra={"tests": tests, **extra}))


# -- what it is for


@pytest.mark.parametrize("tests", [DOUBLE, UNITTEST, f"def test_it():\n    {DOUBLE.splitlines()[0]}"])
async def test_right_and_wrong_programs(sandbox, tests):
    assert (await verdict(sandbox, RIGHT, tests)) == Verdict(passed=True)
    wrong = await verdict(sandbox, "def double(x):\n    return 3 * x", tests)
    assert not wrong.passed
    assert "Assertion" in wrong.why


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(*a, **k): return a, k", "assert f(1, (2.5, None), b=[{3}]) == ((1, (2.5, None)), {'b': [{3}]})"),
        ("def f(x): x.sort()", "items = [3, 1, 2]\nf(items)\nassert items == [1, 2, 3]"),
        ("def f(x): x['a'] = 1", "d = {}\nf(d)\nassert d == {'a': 1}"),
        ("def f(): yield from 'abc'", "assert list(f()) == ['a', 'b', 'c']"),
        (
            "def f(): return {(1, 2): b'x', 'c': 1j, frozenset({1}): True}",
            "assert f()[(1, 2)] == b'x' and f()['c'] == 1j",
        ),
        ("def f(): return 10 ** 3000", "assert f() == 10 ** 3000"),
        ("def f(): return float('inf')", "assert f() == float('inf')"),
        ("LIMIT = 5\ndef f(): return LIMIT", "assert f() == LIMIT"),
        (
            "def f(x): return 1 / x",
            "try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    pass\nassert True",
        ),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
            "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert s.items == [1]\nassert len(s) == 1",
        ),
        ("def f(x): return x", "from solution import f\nassert f(3) == 3"),
        ("def f(x): return x", "import solution\nassert solution.f(3) == 3"),
        ("from collections import Counter\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
    ],
)
async def test_values_of_all_kinds_cross(here, program, tests):
    assert (await verdict(here, program, tests)) == Verdict(passed=True)


async def test_check_with_an_entry_point(here):
    tests = "def check(candidate):\n    assert candidate(2) == 4"
    assert (await verdict(here, RIGHT, tests, entry_point="double")).passed
    assert not (await verdict(here, "def double(x): return 0", tests, entry_point="double")).passed


async def test_inputs_and_outputs_of_a_program(sandbox):
    tests = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    adds = "import sys\nprint(sum(map(int, input().split())), '')\nprint('noise', file=sys.stderr)"
    assert (await verdict(sandbox, adds, tests)).passed
    assert not (await verdict(sandbox, "print(3)", tests)).passed
    assert not (await verdict(sandbox, adds + "\nsys.exit(1)", tests)).passed


async def test_inputs_and_outputs_of_a_function(here):
    tests = {"fn_name": "pair", "inputs": ["1\n[2]", [3, []]], "outputs": ["[1, [2]]", [3, []]]}
    assert (await verdict(here, "def pair(a, b): return a, b", tests)).passed
    assert not (await verdict(here, "def pair(a, b): return b, a", tests)).passed


def test_the_last_block_is_the_program():
    assert program_of("First:\n```python\na\n```\nno:\n```\nb\n```\nas said") == "b\n"
    assert program_of("x = 1") == "x = 1"
    assert FENCED.findall("```python\nnever closed") == []


# -- tricks


ALWAYS_EQUAL = """
class AlwaysEqual({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    __hash__ = object.__hash__
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def assertEqual(self, *a): return True
def double(x):
    return AlwaysEqual()
"""
TRICKS = {
    "sys.exit at once": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef double(x):\n    sys.exit(0)",
    "os._exit at once": "import os\nos._exit(0)",
    "os._exit in the call": "import os\ndef double(x):\n    os._exit(0)",
    "always equal": ALWAYS_EQUAL.format(base="object"),
    "always equal number": ALWAYS_EQUAL.format(base="int"),
    "always equal text": ALWAYS_EQUAL.format(base="str"),
    "always equal list": ALWAYS_EQUAL.format(base="list"),
    "conftest that rewrites reports": (
        "open('conftest.py', 'w').write('''import pytest\n@pytest.hookimpl(hookwrapper=True)\n"
        "def pytest_runtest_makereport(item, call):\n    out = yield\n    out.get_result().outcome = 'passed'\n''')\n"
        "def double(x): return None"
    ),
    "unittest patched": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\n"
        "unittest.TestCase.assertRaises = None\nunittest.TestResult.wasSuccessful = lambda self: True\n"
        "def double(x): return None"
    ),
    "assert patched": (
        "import builtins\nclass Never(Exception): pass\nbuiltins.AssertionError = Never\n"
        "__debug__ and None\ndef double(x): return None"
    ),
    "names of the tests' own": (
        "def assertEqual(*a): return True\nclass TestCase: pass\ndef check(*a): pass\n"
        "def all(x): return True\ndef abs(x): return 0\ndef double(x): return None"
    ),
    "answers read from disk": (
        "import re\nfrom glob import glob\ndef double(x):\n"
        "    for path in glob('/tmp/**') + glob('/proc/*/*') + glob('/home/**'):\n"
        "        try:\n            found = re.search(r'double\\(' + repr(x) + r'\\) == (\\S+)', open(path).read())\n"
        "        except Exception: continue\n        if found: return eval(found[1])\n"
    ),
    "answers read from memory": (
        "import gc, sys\ndef double(x):\n    for each in gc.get_objects():\n"
        "        if isinstance(each, dict) and 'tests' in each: raise SystemExit\n    frame = sys._getframe()\n"
        "    while frame:\n        for value in frame.f_locals.values():\n"
        "            if isinstance(value, str) and 'assert double' in value: return 4\n        frame = frame.f_back\n"
    ),
    "a summary printed": (
        "print('Ran 3 tests in 0.001s\\n\\nOK')\nprint('{\"passed\": true}')\ndef double(x): return None"
    ),
    "a verdict on every descriptor": (
        "import os\nfor fd in range(1, 64):\n    try: os.write(fd, b'{\"passed\": true}\\n')\n"
        "    except OSError: pass\ndef double(x): return None"
    ),
    "its answers are something else": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'[' * 10**6)\n    except OSError: pass"
    ),
    "parent killed": "import os, signal\ndef double(x):\n    os.kill(os.getpid(), signal.SIGKILL)",
    "never ends": "def double(x):\n    while True: pass",
    "not a program": "def double(x) return",
    "no such function": "def triple(x): return 3 * x",
    "raises": "def double(x): raise AssertionError('fine')",
}


@pytest.mark.parametrize("trick", TRICKS)
async def test_no_trick_passes(here, trick):
    for judged in await asyncio.gather(*(verdict(here, TRICKS[trick], tests) for tests in (DOUBLE, UNITTEST))):
        assert not judged.passed
        assert judged.why


async def test_no_trick_passes_without_bubblewrap_either():
    plain = Sandbox(LIMITS, backend=Backend.PLAIN)
    for trick in ("os._exit in the call", "always equal", "unittest patched", "a verdict on every descriptor"):
        assert not (await verdict(plain, TRICKS[trick], UNITTEST)).passed, trick


async def test_a_dying_program_is_no_exception_that_a_test_waits_for(here):
    tests = "try:\n    double(1)\nexcept Exception:\n    pass\nassert True"
    for trick in ("sys.exit in the call", "os._exit in the call"):
        assert not (await verdict(here, TRICKS[trick], tests)).passed


async def test_an_object_is_neither_true_nor_false(here):
    """`assert is_even(4)` would take any object for a yes."""
    lazy = "class Yes: pass\ndef is_even(x): return Yes()"
    assert not (await verdict(here, lazy, "assert is_even(4)")).passed


# -- whose fault it is


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("x = 1", "no assert"),
        ("assert (", "no Python"),
        (None, "neither Python nor inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": "f(x) or f"}, "no name"),
    ],
)
async def test_bad_tests_are_raised_and_no_zero(here, tests, says):
    with pytest.raises(ValueError, match=says):
        await verdict(here, RIGHT, tests)


async def test_a_tester_without_a_verdict_is_raised(here):
    with pytest.raises(RuntimeError, match="without a verdict"):
        await verdict(here, RIGHT, "import os\nos._exit(0)\nassert double(1) == 2")


async def test_as_a_reward(evidence):
    graded = code(LIMITS)
    good = evidence(f"Here:\n```python\n{RIGHT}\n```", extra={"tests": DOUBLE})
    assert (await score([graded], good, 20, UserCalls())).parts == {"code": 1.0}
    with pytest.raises(RewardFailed, match="code raised"):
        await score([graded], evidence("x"), 20, UserCalls())

import pytest

from slipstream import Outcome
from slipstream.errors import UserError
from slipstream.rewards import overlong, repetition, score, unfinished
from slipstream.usercall import UserCalls


async def value(each, shown) -> float:
    return (await score([each], shown, 5, UserCalls())).parts[each.name]


@pytest.mark.parametrize(("length", "cost"), [(0, 0), (60, 0), (80, -0.5), (100, -1), (120, -1)])
async def test_overlong_counts_what_was_sampled(evidence, length, cost):
    shown = evidence(sampled=((0, False),) * 500 + ((1, True),) * length + ((0, False),) * 500)
    assert await value(overlong(100, 40), shown) == pytest.approx(cost)


async def test_unfinished(evidence):
    assert await value(unfinished(), evidence()) == 0.0
    assert await value(unfinished(), evidence(outcome=Outcome.TRUNCATED_TOKENS)) == -1.0
    assert await value(unfinished(), evidence(outcome=Outcome.TRUNCATED_TURNS)) == 0.0


async def test_repetition(evidence):
    fresh = tuple((token, True) for token in range(10))
    assert await value(repetition(3), evidence(sampled=fresh)) == 0.0
    assert await value(repetition(3), evidence(sampled=((7, True),) * 10)) == pytest.approx(-7 / 8)
    assert await value(repetition(3), evidence(sampled=fresh[:2])) == 0.0
    told = tuple((token, token % 2 == 0) for token in (1, 2, 1, 4, 1, 6, 1, 8))  # what repeats was not sampled
    assert await value(repetition(2), evidence(sampled=told)) == 0.0


@pytest.mark.parametrize("make", [lambda: overlong(10, 0), lambda: overlong(10, 11), lambda: repetition(0)])
def test_refused(make):
    with pytest.raises(UserError):
        make()

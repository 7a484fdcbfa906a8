"""The math reward: last box only, compared as mathematics, in a process that may hang."""

import pytest

from slipstream.rewards import RewardFailed, math, score
from slipstream.rewards.mathematics import boxes
from slipstream.usercall import UserCalls


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{1} and \boxed{ \frac{1}{2} }", ["1", r"\frac{1}{2}"]),
        (r"\boxed{\boxed{3}}", [r"\boxed{3}"]),
        (r"\boxed{never closed", []),
        (r"\boxed 3, \fbox{4}", []),
        (r"\boxed{}", [""]),
    ],
)
def test_boxes(text, found):
    assert boxes(text) == found


async def test_answers(evidence):
    right = math(seconds=5.0)  # a busy machine takes a while over the ones that end
    endless = r"\boxed{9^{9^{9^{9^9}}} + \sin(9^{9^{9^9}})}"

    async def said(text: str, gold: str = "1/2") -> float:
        return (await score([right], evidence(text, answer=gold), 60, UserCalls())).parts["math"]

    # What never ends is no answer, and keeps nobody after it.
    assert await said(endless) == 0.0
    for good in (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{7} no, \boxed{1/2}", r"\boxed{\dfrac12}"):
        assert await said(good) == 1.0, good
    for bad in (
        r"1/2",
        r"\boxed{1/2} or \boxed{7}",
        r"\boxed{}",
        r"\boxed{7}",
        r"\boxed{1/2",
        r"\boxed{" + "9" * 3000 + "}",
    ):
        assert await said(bad) == 0.0, bad
    assert await said("".join(rf"\boxed{{{n}}} " for n in range(99)) + r"\boxed{1/2}") == 0.0  # a hundred guesses
    assert await said(r"\boxed{1+x^2}", r"So it is $\boxed{x^2+1}$.") == 1.0
    with pytest.raises(RewardFailed, match="no answer to compare with"):
        await said(r"\boxed{1}", " ")
    assert await said(endless) == 0.0  # and no process is left when the event loop closes

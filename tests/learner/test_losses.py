"""Policy losses, aggregation and KL against numbers computed elsewhere, and their behaviour at the edges."""

import math

import msgspec
import pytest
import torch
from torch import Tensor

from slipstream.learner.corrections import PRESETS, Rule, correct
from slipstream.learner.losses import LOSSES, aggregate, kl, policy_loss

NAN, INF = float("nan"), float("inf")
# verl's worked batch: rows of three and four tokens, one masked position that must not matter.
OLD = torch.tensor([-1, -0.5, -2, NAN, -0.2, -1.5, -0.7, -3], dtype=torch.float64)
ROLLOUT = torch.tensor([-1.2, -0.4, -3.5, INF, -0.2, -1, -0.9, -1], dtype=torch.float64)
NEW = torch.tensor([-0.9, -0.8, -1.6, -INF, -0.3, -1.2, -0.7, -2.5], dtype=torch.float64)
ADVANTAGES = torch.tensor([1, 1, 1, INF, -0.5, -0.5, -0.5, -0.5], dtype=torch.float64)
SAMPLED = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
BOUNDS = torch.tensor([0, 4, 8], dtype=torch.int32)
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def close(found: Tensor | float, expected: object, within: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        atol=within,
        rtol=0,
    )


def on_worked_batch(name: str, mode: str = "token_mean", **more: object) -> tuple[float, Tensor, dict[str, float]]:
    logp = NEW.clone().requires_grad_()
    loss = policy_loss(name, logp=logp, logp_old=OLD, advantages=ADVANTAGES, sampled=SAMPLED, cu_seqlens=BOUNDS, **more)
    total = aggregate(loss.per_token, SAMPLED, BOUNDS, mode=mode)
    total.backward()
    return total.item(), logp.grad, loss.stats


@pytest.mark.parametrize(
    ("name", "mode", "params", "value", "gradient"),
    [
        (
            *("ppo", "token_mean", {**CLIP, "dual_clip": 3.0}, -0.096326),
            [-0.157882, -0.105831, 0, 0, 0.064631, 0.096418, 0.071429, 0.117766],
        ),
        ("gspo", "sequence_mean", CLIP, -0.236658, [*[-0.178157] * 3, 0, *[0.074453] * 4]),
        (
            *("sapo", "sequence_mean", {}, -0.523995),
            [-0.183687, -0.121419, -0.234188, 0, 0.056411, 0.081583, 0.0625, 0.091959],
        ),
        ("reinforce", "token_mean", {}, 0.135714, [*[-0.142857] * 3, 0, *[0.071429] * 4]),
        (
            *("cispo", "token_mean", CLIP, 0.118418),
            [-0.157882, -0.114286, -0.182857, 0, 0.064631, 0.091429, 0.071429, 0.091429],
        ),
        (
            # verl's value, .088241, is of -min(r, c).detach() A log p: the same gradient. Ours is of -min(r, c) A.
            *("dppo_tv", "token_mean", {"limit": 0.2}, -0.126586),
            [-0.157882, -0.105831, -0.213118, 0, 0.064631, 0.096418, 0.071429, 0.117766],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_verls_values_and_gradients(name: str, mode: str, params: dict, value: float, gradient: list) -> None:
    found, grad, _ = on_worked_batch(name, mode, **params)
    close(grad, gradient)
    close(found, value)


def test_verls_statistics() -> None:
    stats = on_worked_batch("ppo", **CLIP)[2]
    close(stats["clip_fraction"], 1 / 7)
    close(stats["ppo_kl"], -0.128571)
    close(on_worked_batch("cispo", **CLIP)[2]["clip_fraction"], 4 / 7)


def test_weights_of_a_correction_multiply() -> None:
    weights = correct(OLD, ROLLOUT, SAMPLED, BOUNDS, Rule.preset("tis")).weights
    close(on_worked_batch("ppo", **CLIP, weights=weights)[0], -0.428018)


# prime-rl's worked trajectory, summed; the rollout is the old policy.
TRAINER = torch.tensor([0.5, 0.9, 0.3, 0.1, 0.05, 0.6], dtype=torch.float64).log()
ENGINE = torch.tensor([0.5, 0.6, 0.6, 0.4, 0.06, 0.3], dtype=torch.float64).log()
SIGNS = torch.tensor([1, 1, 1, -1, -1, -1], dtype=torch.float64)
ALL, ONE = torch.ones(6, dtype=torch.bool), torch.tensor([0, 6], dtype=torch.int32)


def summed(name: str, *rules: Rule, **params: float) -> tuple[float, Tensor]:
    logp = TRAINER.clone().requires_grad_()
    correction = correct(TRAINER, ENGINE, ALL, ONE, list(rules))
    loss = policy_loss(
        name,
        logp=logp,
        logp_old=ENGINE,
        advantages=SIGNS,
        sampled=ALL,
        cu_seqlens=ONE,
        weights=correction.weights,
        keep=correction.keep,
        **params,
    )
    total = aggregate(loss.per_token, ALL, ONE, mode="token_mean", denominator=1)
    total.backward()
    return total.item(), logp.grad


def truncate(high: float) -> Rule:
    return Rule(action="truncate", high=high)


@pytest.mark.parametrize(
    ("name", "rules", "params", "value", "gradient"),
    [
        (
            *("dppo_tv", [], {"penalty": 1e-3}, 1.336414),
            [-1, 0.000811, -0.501386, -0.002773, 0.832969, 2.001387],
        ),
        ("dppo_tv", [], {}, 1.333333, [-1, 0, -0.5, 0, 0.833333, 2]),
        ("reinforce", [truncate(8.0)], {}, -2.640567, [-1, -1.5, -0.5, 0.25, 0.833333, 2]),
        (
            *("reinforce", [Rule(action="mask", low=0.5001, high=1.4), truncate(8.0)], {}, -1.803296),
            [-1, 0, 0, 0, 0.833333, 0],
        ),
        ("reinforce", [Rule(action="mask", over="mean", low=0.9)], {}, 0, [0] * 6),
        ("reinforce", [Rule(action="mask", over="max", high=1.9)], {}, 0, [0] * 6),
        ("reinforce", [truncate(1.02)], {}, -2.190531, None),
        ("reinforce", [truncate(1.0)], {}, -2.182421, [-1, -1, -0.5, 0.25, 0.833333, 1]),
        ("ppo", [], {"clip_low": 0.02, "clip_high": 0.02}, 1.44, None),
    ],
)
def test_prime_rls_and_pipelinerls_values(
    name: str, rules: list[Rule], params: dict, value: float, gradient: list | None
) -> None:
    found, grad = summed(name, *rules, **params)
    close(found, value)
    if gradient is not None:
        close(grad, gradient)


def test_the_textbooks_clip_table() -> None:
    ratios = torch.tensor([1.1052, 0.7408, 1.4918, 1.0305, 0.6065], dtype=torch.float64)
    for clip_high, expected in ((0.2, 1.2), (0.28, 1.28)):
        loss = policy_loss(
            "ppo",
            logp=ratios.log(),
            logp_old=torch.zeros(5, dtype=torch.float64),
            advantages=torch.ones(5, dtype=torch.float64),
            sampled=torch.ones(5, dtype=torch.bool),
            cu_seqlens=torch.tensor([0, 5]),
            clip_low=0.2,
            clip_high=clip_high,
        )
        close(-loss.per_token, [1.1052, 0.7408, expected, 1.0305, 0.6065])


def test_the_textbooks_ratio_of_a_whole_answer() -> None:
    """One noisy token is clipped as a token, and within bounds as part of its trajectory."""
    old = torch.tensor([-0.1, -0.2, -0.05, -2.5, -0.15], dtype=torch.float64)
    new = torch.tensor([-0.12, -0.18, -0.07, -1.6, -0.16], dtype=torch.float64)
    alike = {
        "logp": new,
        "logp_old": old,
        "advantages": torch.ones(5, dtype=torch.float64),
        "sampled": torch.ones(5, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 5]),
        "clip_low": 0.2,
        "clip_high": 0.2,
    }
    close(-policy_loss("gspo", **alike).per_token, [1.1901] * 5, 5e-5)
    close(-policy_loss("ppo", **alike).per_token, [0.9802, 1.0202, 0.9802, 1.2, 0.99], 5e-5)


def test_the_textbooks_supervised_loss() -> None:
    graded = torch.tensor([0.40, 0.85, 0.92, 0.78, 0.96], dtype=torch.float64)
    tokens = torch.cat([torch.full((7,), NAN, dtype=torch.float64), -graded.log()])
    sampled = torch.tensor([False] * 7 + [True] * 5)
    close(aggregate(tokens, sampled, torch.tensor([0, 12]), mode="token_mean"), 0.2903, 5e-5)


def test_aggregation() -> None:
    values = torch.tensor([1, 2, 30, 4, 50, 6], dtype=torch.float64)
    sampled = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool)
    bounds = torch.tensor([0, 3, 6])
    close(aggregate(values, sampled, bounds, mode="token_mean"), 3.25)
    close(aggregate(values, sampled, bounds, mode="sequence_mean"), 3.25)
    close(aggregate(values, sampled, bounds, mode="sequence_sum", length=3), 2.166667)
    close(aggregate(values, sampled, bounds, mode="token_mean", denominator=10), 1.3)
    uneven = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.bool)
    close(aggregate(values, uneven, bounds, mode="sequence_mean"), (1 + 5) / 2)
    with pytest.raises(ValueError, match="needs length"):
        aggregate(values, sampled, bounds, mode="sequence_sum")
    with pytest.raises(ValueError, match="'mean' is not one of"):
        aggregate(values, sampled, bounds, mode="mean")


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "sequence_sum"])
def test_parts_with_the_wholes_denominator_add_up(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 0, 5, 1, 4]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(13, dtype=torch.float64, generator=generator)
    sampled = torch.rand(13, generator=generator) < 0.7
    whole = aggregate(values, sampled, bounds, mode=mode, length=5)
    denominator = {"token_mean": int(sampled.sum()), "sequence_mean": 5, "sequence_sum": 25}[mode]
    parts = [
        aggregate(
            values[bounds[at] : bounds[to]],
            sampled[bounds[at] : bounds[to]],
            bounds[at : to + 1] - bounds[at],
            mode=mode,
            denominator=denominator,
        )
        for at, to in ((0, 2), (2, 3), (3, 5))
    ]
    close(torch.stack(parts).sum(), whole, 1e-12)


def test_kl_estimators() -> None:
    now, then = torch.tensor([-1, -0.5], dtype=torch.float64), torch.tensor([-1.2, -0.1], dtype=torch.float64)
    close(kl(now, then, estimator="k1"), [0.2, -0.4])
    close(kl(now, then, estimator="k2"), [0.02, 0.08])
    close(kl(now, then), [0.018731, 0.091825])
    # The textbook's average over three tokens.
    now, then = torch.tensor([-0.1, -0.5, -1.2]), torch.tensor([-0.3, -0.6, -2.0])
    close(kl(now, then, estimator="k1").mean(), 0.3667, 5e-5)
    with pytest.raises(ValueError, match="'k4' is not one of"):
        kl(now, then, estimator="k4")


# -- edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("preset", [None, *PRESETS])
@pytest.mark.parametrize("name", LOSSES)
def test_overflow_stays_finite_in_value_and_gradient(name: str, preset: str | None, dtype: torch.dtype) -> None:
    """Log-probs of -91 against -2, advantages of rewards of 1e30, rubbish where nothing was sampled, nothing at all."""
    logp = torch.tensor([-2, -91, -2, -91, NAN, INF, -2, -91, -2, -91, -INF], dtype=dtype, requires_grad=True)
    old = torch.tensor([-91, -2, -91, -2, INF, NAN, -91, -2, -91, -2, -INF], dtype=dtype)
    advantages = torch.tensor([1, 1, 1e30, 1e30, NAN, INF, -1, -1, -1e30, -1e30, 1], dtype=dtype)
    sampled = torch.tensor([1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0], dtype=torch.bool)
    bounds = torch.tensor([0, 0, 2, 6, 11, 11], dtype=torch.int32)
    correction = correct(logp.detach(), old, sampled, bounds, Rule.preset(preset) if preset else [])
    assert all(math.isfinite(value) for value in msgspec.structs.asdict(correction.stats).values())
    for weights, keep in ((None, None), (correction.weights, correction.keep), (old, sampled)):
        if preset and weights is old:
            continue
        for anchor in (old, logp.detach()):
            loss = policy_loss(
                name,
                logp=logp,
                logp_old=anchor,
                advantages=advantages,
                sampled=sampled,
                cu_seqlens=bounds,
                weights=weights,
                keep=keep,
            )
            assert loss.per_token.dtype == dtype
            assert loss.per_token.isfinite().all()
            assert not loss.per_token[~sampled].any()
            assert all(math.isfinite(value) for value in loss.stats.values())
            (gradient,) = torch.autograd.grad(aggregate(loss.per_token, sampled, bounds, mode="token_mean"), logp)
            assert gradient.isfinite().all()
            assert not gradient[~sampled].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "sequence_sum"])
def test_every_token_masked(name: str, mode: str) -> None:
    logp = torch.full((4,), NAN, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(4, dtype=torch.bool)
    loss = policy_loss(
        name, logp=logp, logp_old=logp.detach(), advantages=logp.detach(), sampled=~nothing, keep=nothing,
        cu_seqlens=torch.tensor([0, 1, 4]),
    )  # fmt: skip
    total = aggregate(loss.per_token, nothing, torch.tensor([0, 1, 4]), mode=mode, length=4)
    total.backward()
    assert total.item() == 0
    assert not logp.grad.any()


@pytest.mark.parametrize("name", LOSSES)
def test_keep_selects_and_what_is_dropped_moves_nothing(name: str) -> None:
    keep = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    _, gradient, _ = on_worked_batch(name, keep=keep)
    assert not gradient[~(keep & SAMPLED)].any()
    assert gradient[keep & SAMPLED].any()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_all_pull_where_the_advantage_points(name: str) -> None:
    """At ratio 1 every one of them is the policy gradient: -A / N."""
    logp = OLD.clone().requires_grad_()
    loss = policy_loss(
        name, logp=logp, logp_old=OLD, advantages=ADVANTAGES, sampled=SAMPLED, cu_seqlens=BOUNDS
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(aggregate(loss.per_token, SAMPLED, BOUNDS, mode="token_mean"), logp)
    close(gradient, torch.where(SAMPLED, -ADVANTAGES / 7, 0.0))


def test_dual_clip_bounds_what_a_bad_token_can_cost() -> None:
    logp = torch.tensor([5.0], dtype=torch.float64, requires_grad=True)
    one, alone = torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])
    minus = -torch.ones(1, dtype=torch.float64)
    loss = policy_loss(
        "ppo", logp=logp, logp_old=torch.zeros(1).double(), advantages=minus, sampled=one, cu_seqlens=alone
    ).per_token
    close(loss.detach(), [3.0])
    assert torch.autograd.grad(loss.sum(), logp)[0].item() == 0


def test_dppo_tv_measures_probabilities_and_not_clamped_ratios() -> None:
    logp = torch.tensor([-91.0, -91.0], dtype=torch.float64, requires_grad=True)
    loss = policy_loss(
        "dppo_tv",
        logp=logp,
        logp_old=torch.tensor([-0.1, -2.0]).double(),  # moved by -.905 and by -.135
        advantages=-torch.ones(2).double(),
        sampled=torch.ones(2, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, 2]),
    )
    assert loss.per_token[0].item() == 0
    assert loss.per_token[1].item() > 0
    assert loss.stats["clip_fraction"] == 0.5


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(ValueError, match="'popo' is not one of ppo, gspo"):
        on_worked_batch("popo")

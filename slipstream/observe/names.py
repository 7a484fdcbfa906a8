"""Every metric there is, by name, with its unit and what it says. A name that is not here is a typo, and raises.

Families end in `*`: the rest of the name is a reward's, an outcome's, a tool's or a clock part's.
"""

METRICS: dict[str, str] = {
    "reward/mean": "mean reward of all scored trajectories taken for the step",
    "reward/*": "mean of one reward function's values",
    "outcome/*": "trajectories taken for the step that ended so",
    "turns/mean": "assistant turns of a trajectory",
    "length/mean": "tokens of a trajectory, prompt included",
    "length/max": "tokens of the longest trajectory",
    "staleness/mean": "versions; mean over trained tokens",
    "staleness/p99": "versions; 99th percentile over trained tokens",
    "staleness/max": "versions; of the oldest trained token",
    "staleness/depth": "batches that generation may run ahead, at the moment of the step",
    "tokens/generated": "sampled tokens delivered since the start",
    "tokens/trained": "sampled tokens in a loss since the start",
    "tokens/masked_stale": "sampled tokens over the cutoff since the start",
    "tokens/masked_mismatch": "sampled tokens cut by a mask rule since the start",
    "tokens/zero_signal": "sampled tokens of groups with equal rewards since the start",
    "tokens/discarded_stale": "sampled tokens of groups that were all stale since the start",
    "tokens/failed": "sampled tokens of trajectories that failed since the start",
    "tokens/in_flight": "sampled tokens delivered and not yet settled",
    "tokens/step": "tokens in the step's packed batch",
    "tokens/step_trained": "sampled tokens in the step's loss",
    "groups/taken": "groups taken for the step, dropped ones included",
    "groups/zero_signal": "groups dropped for the step: equal rewards",
    "groups/discarded_stale": "groups dropped for the step: all tokens stale",
    "groups/pass_rate": "mean pass rate of the groups taken",
    "mismatch/kl_k1": "mean(log p rollout - log p learner)",
    "mismatch/kl_k3": "mean(ratio - 1 - log ratio), learner against rollout",
    "mismatch/max_prob_diff": "largest |p learner - p rollout|",
    "is/ess": "effective sample size of the correction weights, as a fraction",
    "is/weight_mean": "mean correction weight",
    "is/clipped_fraction": "tokens whose weight was truncated",
    "is/masked_fraction": "tokens cut by a mask rule",
    "loss/policy": "policy loss of the step",
    "loss/kl": "mean divergence from the reference at trained tokens, by loss.kl_estimator; 0 without one",
    "loss/entropy": "nats; mean entropy at trained tokens",
    "loss/clip_fraction": "tokens on the flat side of the clip",
    "step/hidden_fraction": "share of the step's work that was done while it waited for data",
    "grad/norm": "gradient norm before clipping",
    "grad/skipped": "1 when the step was skipped: gradient not finite",
    "lr": "learning rate",
    "queue/trajectories": "delivered and not yet settled",
    "queue/bytes": "bytes of those",
    "queue/leases": "leases running",
    "queue/groups_ready": "complete groups that wait for the learner",
    "weights/publish_s": "seconds to write and announce a version",
    "weights/pause_s": "seconds generation stood still for a version",
    "weights/version": "newest version",
    "time/learner/*": "seconds of the learner's wall time since its start, by part",
    "time/rollouter/*": "seconds of the rollouters' wall time since their start, by part",
    "tool/*": "NAME/calls, NAME/errors (of those), NAME/p50_s and NAME/p99_s (seconds) since the rollouters' start",
    "throughput/generated_tok_s": "sampled tokens delivered a second",
    "throughput/trained_tok_s": "sampled tokens trained a second",
}
_FAMILIES = tuple(name[:-1] for name in METRICS if name.endswith("*"))


def check(name: str) -> None:
    """Raises KeyError for a name that is none of ours."""
    if name not in METRICS and not name.startswith(_FAMILIES):
        raise KeyError(f"{name!r} is no metric; add it to observe/names.py")

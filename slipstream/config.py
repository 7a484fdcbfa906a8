"""Every knob of a run: one Struct a section, one sentence a key that says when to turn it.

Invariant: a config is read once (`configfile.read_config`), checked there, and never changed afterwards.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: immutable, and an unknown key is an error."""


class RunSection(Section, frozen=True):
    name: Annotated[str, Meta(description="Names the run directory (runs/NAME) and the wandb run.")] = "run"
    seed: Annotated[
        int,
        Meta(
            ge=0, lt=2**32, description="Decides task order and every sampling seed; change it to repeat an experiment."
        ),
    ] = 0
    steps: Annotated[int, Meta(ge=1, description="Optimizer steps to train for; the run's length.")] = 100
    restarts: Annotated[
        int, Meta(ge=0, description="How often a process that died is started again before the run gives up.")
    ] = 5


class ModelSection(Section, frozen=True):
    path: Annotated[str, Meta(description="Hugging Face folder of the start model: weights, tokenizer, chat template.")]
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Meta(description="Engine precision; auto is float32 on a CPU (as the learner there), bfloat16 elsewhere."),
    ] = "auto"


class EnvironmentSection(Section, frozen=True):
    path: Annotated[
        str, Meta(description="FILE.py:NAME of your Environment (tools, rewards, system prompt), beside the config.")
    ]


class TasksSection(Section, frozen=True):
    train: Annotated[
        str,
        Meta(
            description="Training tasks: .jsonl, .parquet, a Hugging Face dataset folder, or FILE.py:FUNCTION called "
            "as f(seed) and yielding rows. Several: 'a.jsonl * 2 + b.parquet', with each row of a twice in a pass."
        ),
    ]
    heldout: Annotated[
        str, Meta(description="Held-out tasks in the same form, solved before and after training; '' for none.")
    ] = ""
    heldout_limit: Annotated[int, Meta(ge=1, description="At most this many held-out tasks; fewer end sooner.")] = 200
    sampler: Annotated[
        Literal["shuffle", "pools"],
        Meta(description="Which task is next: shuffle, or pools: those always or never solved come a fifth as often."),
    ] = "shuffle"
    bad_rows: Annotated[
        Literal["stop", "skip"],
        Meta(description="A row that is no task stops the run before it starts, or is skipped, counted and logged."),
    ] = "stop"


class RolloutSection(Section, frozen=True):
    group: Annotated[
        int, Meta(ge=2, description="Trajectories per task; raise it when many groups have rewards all equal.")
    ] = 8
    group_min: Annotated[
        int,
        Meta(ge=0, description="So many are enough for a group open longer than queue.lease_seconds; 0 waits for all."),
    ] = 0
    concurrency: Annotated[
        int, Meta(ge=1, description="Trajectories one rollouter runs at once; raise it until the engine is busy.")
    ] = 32
    max_tokens: Annotated[
        int, Meta(ge=1, description="Sampled tokens one trajectory may spend over all its turns.")
    ] = 1024
    max_turns: Annotated[int, Meta(ge=1, description="Assistant turns one trajectory may take.")] = 8
    max_seconds: Annotated[
        float, Meta(gt=0, description="Wall-clock budget of one trajectory, tools included; then it is a timeout.")
    ] = 120.0
    park_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="A trajectory older than this is parked with the queue so often, to outlive a crash; 0: never.",
        ),
    ] = 60.0
    temperature: Annotated[
        float, Meta(gt=0, description="Sampling temperature; lower it only when the model rambles at 1.")
    ] = 1.0
    tool_seconds: Annotated[float, Meta(gt=0, description="Time one tool call may take before it is an error.")] = 10.0
    tools_at_once: Annotated[
        int,
        Meta(ge=0, description="Tool calls one rollouter runs at once; set it if they slow each other; 0: no limit."),
    ] = 0
    tool_tokens: Annotated[
        int, Meta(ge=1, description="Longest tool result, in tokens; the rest is cut and the model is told.")
    ] = 512


class EngineSection(Section, frozen=True):
    rollouters: Annotated[
        int, Meta(ge=1, description="Rollouter processes to start, one vLLM engine each; add some when it lags.")
    ] = 1
    max_model_len: Annotated[
        int, Meta(ge=16, description="Longest stream (prompt and all turns) the engine takes; memory grows with it.")
    ] = 2048
    kv_cache_mb: Annotated[
        int, Meta(ge=1, description="Memory for the KV cache; raise it when requests wait for a slot.")
    ] = 256
    block_size: Annotated[
        int,
        Meta(
            ge=32,
            multiple_of=32,
            description="Tokens per KV block; prompts shorter than one never hit the prefix cache.",
        ),
    ] = 32
    threads: Annotated[int, Meta(ge=1, description="CPU threads of one engine; leave some to the learner.")] = 1
    start: Annotated[
        Literal["auto", "fork", "spawn"],
        Meta(description="How the engine process starts; fork (auto's choice on a CPU) saves half a minute."),
    ] = "auto"
    on_update: Annotated[
        Literal["keep", "recompute"],
        Meta(description="KV of running requests at new weights: keep it, or recompute (exact, slower)."),
    ] = "keep"


class StalenessSection(Section, frozen=True):
    depth: Annotated[
        Annotated[float, Meta(ge=0)] | Literal["auto"],
        Meta(
            description="Batches that generation may run ahead: 0 is on-policy; raise it if the learner waits, or let "
            "auto find the least at which it does not."
        ),
    ] = 2.0
    auto_min: Annotated[
        float, Meta(ge=0, description="With depth auto: its least; where a run begins. Raise it to begin faster.")
    ] = 1.0
    auto_max: Annotated[
        float, Meta(ge=0, description="With depth auto: its most; lower it when old tokens hurt more than waiting.")
    ] = 8.0
    auto_ess: Annotated[
        float, Meta(ge=0, lt=1, description="With depth auto: under this is/ess depth goes down, whatever waits.")
    ] = 0.5
    cutoff: Annotated[
        int, Meta(ge=0, description="No token older than this many versions is trained on; lower it if ESS falls.")
    ] = 8

    @property
    def start_depth(self) -> float:
        return self.auto_min if self.depth == "auto" else self.depth


class QueueSection(Section, frozen=True):
    lease_seconds: Annotated[
        float, Meta(gt=0, description="A lease returns to the queue after this; keep it above rollout.max_seconds.")
    ] = 180.0
    memory_mb: Annotated[
        int, Meta(ge=0, description="Trajectories held before no new group is opened; 0 is 25% of the memory there is.")
    ] = 0
    selection: Annotated[
        Literal["fifo", "window", "oldest", "fair"],
        Meta(
            description="Next groups: first complete; window if quick tasks crowd out slow ones; oldest if much is "
            "masked_stale; fair: datasets in turn."
        ),
    ] = "fifo"
    fsync: Annotated[
        Literal["delivery", "interval", "never"],
        Meta(description="When the journal is forced to disk: each delivery survives a power cut, or every second."),
    ] = "interval"
    keep: Annotated[
        Literal["all", "checkpoint"],
        Meta(description="Journal: all, for replay and the viewer, or what a crash needs since the last checkpoint."),
    ] = "all"
    listen: Annotated[
        str, Meta(description="Address to bind, such as tcp://127.0.0.1:5571; '' is a socket in the run directory.")
    ] = ""


class LearnerSection(Section, frozen=True):
    batch: Annotated[int, Meta(ge=1, description="Groups with signal in one optimizer step.")] = 16
    lr: Annotated[float, Meta(gt=0, description="Peak learning rate of AdamW.")] = 1e-6
    warmup: Annotated[int, Meta(ge=0, description="Steps over which the learning rate rises to its peak.")] = 5
    schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Meta(description="How the learning rate falls until run.steps; constant when the end is open."),
    ] = "constant"
    weight_decay: Annotated[float, Meta(ge=0, description="AdamW weight decay.")] = 0.0
    betas: Annotated[tuple[float, float], Meta(description="AdamW moment decays.")] = (0.9, 0.95)
    clip_norm: Annotated[float, Meta(gt=0, description="Gradient norm is clipped to this.")] = 1.0
    micro_tokens: Annotated[
        int, Meta(ge=1, description="Tokens in one packed micro-batch; lower it when memory is short.")
    ] = 8192
    chunk_tokens: Annotated[
        int, Meta(ge=1, description="Tokens whose logits exist at once; lower it for large vocabularies.")
    ] = 1024
    proximal: Annotated[
        Literal["recompute", "bypass", "interpolate"],
        Meta(description="Anchor of the clip: the learner's log-probs, the rollout's, or between them by staleness."),
    ] = "recompute"
    ess_lr: Annotated[
        bool, Meta(description="Scale the rate by sqrt(is/ess): smaller steps when the batch is off-policy (VCPO).")
    ] = False
    checkpoint_every: Annotated[
        int,
        Meta(ge=0, description="Steps between checkpoints; 0 writes only the last. A crash repeats steps since."),
    ] = 10
    checkpoints: Annotated[
        int, Meta(ge=1, description="Checkpoints that stay; more of them export and go back further, for their space.")
    ] = 2
    ranks: Annotated[
        int,
        Meta(ge=1, description="Processes the learner is sharded over, one a GPU; torchrun brings its own number."),
    ] = 1
    threads: Annotated[int, Meta(ge=0, description="CPU threads of the learner; 0 leaves it to torch.")] = 0


class AdvantageSection(Section, frozen=True):
    estimator: Annotated[
        Literal["grpo", "dr_grpo", "rloo", "opo", "max_rl", "reinforce_pp_baseline"],
        Meta(description="Group baseline; dr_grpo when easy and hard tasks should weigh by their spread."),
    ] = "grpo"
    population: Annotated[bool, Meta(description="grpo: divide by the textbook's (n) deviation, not (n-1).")] = False
    overlong_buffer: Annotated[
        int,
        Meta(ge=0, description="The last so many tokens of rollout.max_tokens cost reward; set it if answers ramble."),
    ] = 0
    overlong_factor: Annotated[
        float, Meta(gt=0, description="Reward that a trajectory at rollout.max_tokens loses by overlong_buffer.")
    ] = 1.0


class LossSection(Section, frozen=True):
    name: Annotated[
        Literal["ppo", "gspo", "cispo", "sapo", "dppo_tv", "reinforce"],
        Meta(description="Policy loss; cispo keeps the gradient of clipped tokens, gspo clips whole trajectories."),
    ] = "ppo"
    clip_low: Annotated[float, Meta(gt=0, description="Lower clip of the ratio (1 - this).")] = 0.2
    clip_high: Annotated[float, Meta(gt=0, description="Upper clip of the ratio (1 + this); wider explores.")] = 0.28
    dual_clip: Annotated[
        float,
        Meta(gt=1, description="ppo: most that a token of negative advantage A costs, in |A|; lower it on spikes."),
    ] = 3.0
    tv_limit: Annotated[
        float, Meta(gt=0, description="dppo_tv: a probability that moved by more, the way A pulls, is left alone.")
    ] = 0.2
    tv_penalty: Annotated[
        float, Meta(ge=0, description="dppo_tv: coefficient of the squared log-ratio; 1e-3 if the policy drifts.")
    ] = 0.0
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean", "sequence_sum"],
        Meta(description="token_mean weighs long trajectories by length; sequence_mean counts each one alike."),
    ] = "token_mean"
    kl_coef: Annotated[
        float, Meta(ge=0, description="Pull towards the start model, which is then kept in memory too; 0 for none.")
    ] = 0.0
    kl_estimator: Annotated[
        Literal["k1", "k2", "k3"],
        Meta(description="Estimator of that KL: k3 or k2 in the loss; k1 is unbiased, and right in the reward only."),
    ] = "k3"
    kl_in: Annotated[
        Literal["loss", "reward"],
        Meta(description="Where that KL counts: at each token's loss, or summed up and taken off the reward."),
    ] = "loss"
    entropy_coef: Annotated[
        float, Meta(ge=0, description="Bonus for entropy; 1e-3 or so when loss/entropy collapses.")
    ] = 0.0


class CorrectionSection(Section, frozen=True):
    presets: Annotated[
        list[Literal["tis", "tis_sequence", "icepop", "mis_sequence", "mis_geometric", "veto", "k3"]],
        Meta(description="Off-policy rules by name; at most one tis. Empty trusts the engine and the cutoff alone."),
    ] = msgspec.field(default_factory=lambda: ["tis", "icepop"])
    opsm: Annotated[
        float,
        Meta(ge=0, description="Drop bad trajectories that the policy left behind by this (mean log-ratio); 0 is off."),
    ] = 0.0
    m2po: Annotated[
        float,
        Meta(ge=0, description="Drop harmful tokens until their mean squared log-ratio is this (0.04); 0 is off."),
    ] = 0.0


Policy = Literal["train", "mask", "retry"]


class OutcomesSection(Section, frozen=True):
    finished: Annotated[Policy, Meta(description="Ended its turn without a tool call.")] = "train"
    truncated_tokens: Annotated[Policy, Meta(description="Spent its token budget; or mask it.")] = "train"
    truncated_turns: Annotated[Policy, Meta(description="Spent its turns.")] = "train"
    timeout: Annotated[Policy, Meta(description="Spent its seconds; mask, since a slow machine is no fault.")] = "mask"
    tool_failed: Annotated[Policy, Meta(description="A tool broke in a way that the model did not cause.")] = "retry"
    reward_failed: Annotated[Policy, Meta(description="The reward raised, or returned NaN.")] = "mask"
    engine_failed: Annotated[Policy, Meta(description="The engine broke.")] = "retry"
    cancelled: Annotated[Policy, Meta(description="Ended from outside.")] = "retry"
    invalid: Annotated[Policy, Meta(description="Never ran: its prompt does not fit.")] = "mask"
    retries: Annotated[int, Meta(ge=0, description="Grants anew per trajectory before retry becomes mask.")] = 3


class WeightsSection(Section, frozen=True):
    directory: Annotated[
        str, Meta(description="Where versions are published: '' is shared memory; a shared folder reaches other hosts.")
    ] = ""


class ObserveSection(Section, frozen=True):
    wandb: Annotated[Literal["offline", "online", "off"], Meta(description="wandb mode; online needs an account.")] = (
        "offline"
    )
    project: Annotated[str, Meta(description="wandb project.")] = "slipstream"


class Config(Section, frozen=True):
    """A whole run. Paths in it are relative to the config file's folder."""

    model: ModelSection
    environment: EnvironmentSection
    tasks: TasksSection
    run: RunSection = RunSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    staleness: StalenessSection = StalenessSection()
    queue: QueueSection = QueueSection()
    learner: LearnerSection = LearnerSection()
    advantage: AdvantageSection = AdvantageSection()
    loss: LossSection = LossSection()
    correction: CorrectionSection = CorrectionSection()
    outcomes: OutcomesSection = OutcomesSection()
    weights: WeightsSection = WeightsSection()
    observe: ObserveSection = ObserveSection()


class RunDir(msgspec.Struct, frozen=True):
    """Names of everything in a run's directory; nobody spells a path twice."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved config as every process of the run reads it; its paths are absolute."""
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def steps(self) -> Path:
        """What each step made of each token, for the viewer."""
        return self.root / "steps"

    @property
    def view(self) -> Path:
        return self.root / "view"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def wandb(self) -> Path:
        return self.root / "wandb"

"""The learner again over the batches that a run recorded, without rollouters and without a queue.

Invariant: with the run's own config this is the same computation, in the same order, from the same start model: on the
same kind of CPU every version's checksum is the one that was published. What is changed is named, and may only be what
the learner alone decides; batches stay as they were recorded.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from slipstream.config import Config, RunDir
from slipstream.errors import UserError
from slipstream.learner.assembly import Parts, assemble, settle_torch
from slipstream.learner.groups import Dropped, judge
from slipstream.learner.publisher import as_published
from slipstream.learner.recording import Recording, read_recording
from slipstream.learner.step import StepStats
from slipstream.observe.metrics import read_metrics
from slipstream.observe.steps import StepTokens
from slipstream.staleness import Gate
from slipstream.weights_file import checksum

SECTIONS = {"advantage", "correction", "loss", "learner", "outcomes"}
KEYS = {"staleness.cutoff", "run.steps"}
RECORDED = {"learner.batch", "outcomes.retries"}  # what they decided is in the recording
WITHOUT_EFFECT = {"learner.checkpoint_every", "learner.checkpoints", "learner.ranks"}


class Numbers(msgspec.Struct, frozen=True):
    """What a step is compared by. None: not known, or not finite."""

    loss: float | None
    ess: float | None
    clip_fraction: float | None
    grad_norm: float | None
    mismatch: float | None  # mean k3 of proximal against rollout


class Step(msgspec.Struct, frozen=True):
    version: int
    recorded: str  # the checksum that was published
    replayed: str
    groups: int  # that were trained on; recorded ones that the changed config drops are not
    before: Numbers
    now: Numbers


class Verdict(msgspec.Struct, frozen=True):
    """Of a whole replay."""

    changed: list[str]  # overrides
    versions: int  # made again, version 0 aside
    first_difference: int | None  # version
    made_twice: list[int]  # versions that the run itself published with more than one checksum

    @property
    def identical(self) -> bool:
        return self.first_difference is None and not self.made_twice


class Replay:
    """Iterate over it once; `verdict` afterwards."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        overrides: Sequence[str] = (),
        record: Callable[[int, StepTokens], None] | None = None,
    ) -> None:
        """`record` is told of each version that is made. Raises UserError."""
        self._record = record
        refuse_others(overrides)
        self._config, self._changed = config, list(overrides)
        self._recording = read_recording(run_dir.journal)
        self._versions = self._recording.versions()
        if not self._versions:
            raise UserError(f"RUN = {str(run_dir.root)!r}: no step was made in it yet; there is nothing to replay")
        self._metrics = {int(values["step"]): values for values in read_metrics(run_dir)}
        self._first_difference: int | None = None
        self._done = 0

    @property
    def last(self) -> int:
        """The newest version that is made again."""
        return self._versions[-1]

    def __iter__(self) -> Iterator[Step]:
        settle_torch(self._config)
        parts = assemble(self._config)
        self._compare(0, parts)
        for version in self._versions:
            stats, groups = make_version(version, self._recording, parts, self._config)
            if stats is not None and self._record is not None:
                self._record(version, parts.trainer.tokens())
            replayed = self._compare(version, parts)
            self._done = version
            yield Step(
                version=version,
                recorded=_last(self._recording, version),
                replayed=replayed,
                groups=groups,
                before=_recorded_numbers(self._metrics.get(version, {})),
                now=_numbers(stats),
            )

    def _compare(self, version: int, parts: Parts) -> str:
        made = checksum(as_published(parts.policy.tensors()))
        if self._first_difference is None and made != _last(self._recording, version):
            self._first_difference = version
        return made

    def verdict(self) -> Verdict:
        twice = [version for version, sums in sorted(self._recording.checksums.items()) if len(sums) > 1]
        return Verdict(self._changed, self._done, self._first_difference, twice)


def make_version(version: int, recording: Recording, parts: Parts, config: Config) -> tuple[StepStats | None, int]:
    """One step from the recorded batch, and how many groups it was of; no step when the config drops them all."""
    gate = Gate(config.learner.batch, config.staleness.start_depth, config.staleness.cutoff)
    parts.trainer.begin(version - 1)
    groups = 0
    for group in recording.batches[version]:
        verdict = judge(group.group, recording.read(group), config.outcomes, gate, version - 1)
        if not isinstance(verdict, Dropped):
            parts.trainer.add(verdict)
            groups += 1
    made = parts.trainer.finish() if groups else None
    return (made[0] if made else None), groups


def refuse_others(overrides: Sequence[str]) -> None:
    """An override that would change nothing here, or what is recorded already, is the user's error."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in RECORDED:
            raise UserError(f"{key}: what it decided is recorded with the batches; a replay cannot change it")
        if key in WITHOUT_EFFECT or not (key in KEYS or key.partition(".")[0] in SECTIONS):
            raise UserError(
                f"{key}: has no effect on a replay, which is the learner alone over recorded batches; change "
                f"{', '.join(f'{section}.*' for section in sorted(SECTIONS))}, {' or '.join(sorted(KEYS))}"
            )


def _last(recording: Recording, version: int) -> str:
    return (recording.checksums.get(version) or [""])[-1]


def _recorded_numbers(values: dict[str, float]) -> Numbers:
    names = ("loss/policy", "is/ess", "loss/clip_fraction", "grad/norm", "mismatch/kl_k3")
    return Numbers(*(values.get(name) for name in names))


def _numbers(stats: StepStats | None) -> Numbers:
    if stats is None:
        return Numbers(None, None, None, None, None)
    return Numbers(stats.loss, stats.ess, stats.clip_fraction, stats.grad_norm, stats.kl_k3)

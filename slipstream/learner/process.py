"""The learner process: takes groups as they come, makes a version of each batch, publishes it, goes on.

Invariant: version v+1 is published before the groups it consumed are settled, and a checkpoint is announced after it is
on disk: whatever is killed in between, the queue hands out again what the newest checkpoint does not contain.
"""

import logging
import signal
from collections import Counter
from types import FrameType

import torch

from slipstream.config import Config, RunDir
from slipstream.learner import checkpoint
from slipstream.learner.groups import Candidate, Dropped, judge
from slipstream.learner.optimizer import Optimizer, learning_rate
from slipstream.learner.policy import Policy
from slipstream.learner.publisher import Publisher, weights_directory
from slipstream.learner.report import Report
from slipstream.learner.step import Trainer
from slipstream.observe.clock import Clock
from slipstream.observe.metrics import MetricsWriter
from slipstream.queue.client import LearnerClient
from slipstream.staleness import Gate

log = logging.getLogger(__name__)

TAKE_SECONDS = 2.0  # one wait for groups; then the clock is read, signals are heeded, and it is made again
SAY_EVERY = 15.0  # seconds of waiting for data between two lines that say for what


def run(config: Config, run_dir: RunDir) -> int:
    """Train until run.steps, or SIGTERM. Returns the exit code."""
    if config.learner.threads:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    learner = Learner(config, run_dir)
    signal.signal(signal.SIGTERM, learner.stop)
    try:
        return learner.train()
    finally:
        learner.close()


class Learner:
    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config, self._run_dir = config, run_dir
        self.clock = Clock("learner", "starting")
        self._policy = Policy(
            config.model.path, chunk_tokens=config.learner.chunk_tokens, temperature=config.rollout.temperature
        )
        self._optimizer = Optimizer(
            self._policy.parameters(),
            rate=learning_rate(config.learner.lr, config.learner.warmup, config.run.steps, config.learner.schedule),
            clip_norm=config.learner.clip_norm,
            betas=config.learner.betas,
            weight_decay=config.learner.weight_decay,
        )
        self._trainer = Trainer(config, self._policy, self._optimizer)
        self._gate = Gate(config.learner.batch, config.staleness.depth, config.staleness.cutoff)
        self._version = checkpoint.load_newest(run_dir.checkpoints, self._policy, self._optimizer)
        self._saved = self._version
        tensors = self._policy.tensors()
        nbytes = sum(tensor.numel() * 4 for tensor in tensors.values())
        self._publisher = Publisher(weights_directory(config, run_dir, nbytes))
        self._client = LearnerClient((run_dir.root / "queue.url").read_text().strip(), version=self._version)
        self._metrics = MetricsWriter(run_dir, config)
        self._report = Report(self._client, self.clock)
        self._stopping = False
        self._dropped: Counter[str] = Counter()  # groups out of the batch since the last step, by reason
        self._pass_rates: list[float] = []

    def stop(self, number: int, frame: FrameType | None) -> None:
        log.info("asked to stop: finishes the step, saves, leaves")
        self._stopping = True

    def close(self) -> None:
        self._metrics.close()
        self._client.close()
        self._publisher.close()

    def train(self) -> int:
        self._publish()
        while self._version < self._config.run.steps:
            batch = self._collect()
            if batch is None:
                break
            self._step(batch)
        if self._version > self._saved:
            self._save()
        if self._version >= self._config.run.steps:
            self.clock.enter("checkpoint")
            checkpoint.export(self._run_dir.checkpoints / "final", self._policy, self._config.model.path)
        log.info("leaves at version %d", self._version)
        return 0

    def _collect(self) -> list[Candidate] | None:
        """A batch of groups with signal; None when asked to stop."""
        batch: list[Candidate] = []
        self._dropped.clear()
        self._pass_rates.clear()
        waited = 0.0
        while len(batch) < self._config.learner.batch:
            if self._stopping:
                return None
            self.clock.enter("waiting for data")
            groups, why = self._client.take(self._config.learner.batch - len(batch), TAKE_SECONDS)
            self.clock.enter("other")
            waited = 0.0 if groups else waited + TAKE_SECONDS
            if waited and waited % SAY_EVERY < TAKE_SECONDS:
                log.warning("waiting for data for %.0f s: %s", waited, why)
            for group, batches in groups:
                verdict = judge(group, batches, self._config.outcomes, self._gate, self._version)
                if isinstance(verdict, Dropped):
                    self._drop(verdict, len(batch))
                else:
                    batch.append(verdict)
        return batch

    def _drop(self, verdict: Dropped, collected: int) -> None:
        """Out of the batch, and its place in the gate is free at once."""
        self._client.settle([verdict.group], verdict.fates)
        self._dropped[verdict.reason] += 1
        self._pass_rates.append(verdict.pass_rate)
        total = self._dropped.total()
        if total % (4 * self._config.learner.batch) == 0:
            mean = sum(self._pass_rates) / len(self._pass_rates)
            log.warning(
                "%d groups dropped for this batch (%s), %d of %d found; the dropped ones' pass rate is %.2f: "
                "tasks are too %s, or raise rollout.group",
                total,
                ", ".join(f"{count} {reason}" for reason, count in self._dropped.items()),
                collected,
                self._config.learner.batch,
                mean,
                "easy" if mean > 0.5 else "hard",
            )

    def _step(self, batch: list[Candidate]) -> None:
        self.clock.enter("forward/backward")
        stats, fates = self._trainer.step(batch, self._version)
        if stats.skipped:
            log.warning("step %d: gradient is not finite (%s); parameters stay", self._version + 1, stats.grad_norm)
        self._version += 1
        publish_s = self._publish()
        self._client.settle([candidate.group for candidate in batch], fates, self._version)
        every = self._config.learner.checkpoint_every
        if every and self._version % every == 0:
            self._save()
        self.clock.enter("other")
        values = self._report.values(stats, batch, self._dropped, publish_s)
        self._metrics.log(self._version, values)
        log.info("%s", self._report.line(self._version, self._config.run.steps, stats, values))

    def _publish(self) -> float:
        """Seconds it took."""
        before = self.clock.reading().parts.get("publishing", 0.0)
        self.clock.enter("publishing")
        self._client.publish(self._publisher.publish(self._version, self._policy.tensors()))
        self.clock.enter("other")
        return self.clock.reading().parts.get("publishing", 0.0) - before

    def _save(self) -> None:
        self.clock.enter("checkpoint")
        checkpoint.save(self._run_dir.checkpoints, self._version, self._policy, self._optimizer)
        self._saved = self._version
        self._client.checkpointed(self._version)

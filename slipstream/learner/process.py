"""The learner process: takes groups as they come, makes a version of each batch, publishes it, goes on.

Invariant: version v+1 is published before the groups it consumed are settled, and consumption is final only once every
checkpoint that is kept contains it: whatever is killed in between, and whichever of them can be read, the queue hands
out again what it does not contain.
"""

import logging
import signal
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from slipstream.config import Config, RunDir
from slipstream.learner import checkpoint
from slipstream.learner.assembly import assemble, settle_torch
from slipstream.learner.folder import write_folder
from slipstream.learner.gathering import follow_first, joined_ranks
from slipstream.learner.groups import Candidate, Dropped, Seen, judge
from slipstream.learner.publisher import Publisher, weights_directory
from slipstream.learner.ranks import Ranks
from slipstream.learner.report import Report, waiting_line
from slipstream.learner.tokens import Recorder
from slipstream.observe.clock import Clock
from slipstream.observe.metrics import MetricsWriter
from slipstream.queue.client import LearnerBeats, LearnerClient, QueueAway
from slipstream.queue.messages import StepPace
from slipstream.staleness import Gate

log = logging.getLogger(__name__)

TAKE_SECONDS = 2.0  # one wait for groups; then the clock is read, signals are heeded, and it is made again
LEAVE_SECONDS = 5.0  # after SIGTERM, how long a queue that is away is waited for
SAY_EVERY = 15.0  # seconds without a group to train on between two lines that say why
HAND_OVER_SECONDS = 15.0  # at the end, how long rollouters are waited for that have not loaded the last version
POLL_SECONDS = 0.1


def run(config: Config, run_dir: RunDir) -> int:
    """Train until run.steps, or SIGTERM or SIGINT. Returns the exit code."""
    with joined_ranks(config.learner.ranks) as ranks:
        if ranks is not None and ranks.rank:
            follow_first(ranks)
            return 0
        settle_torch(config)
        if ranks is not None:
            ranks.agreed(config)
        learner = Learner(config, run_dir, ranks)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, learner.stop)
        try:
            return learner.train()
        finally:
            learner.close()


class Learner:
    def __init__(self, config: Config, run_dir: RunDir, ranks: Ranks | None = None) -> None:
        """`ranks`: those that it is the first of."""
        self._config, self._run_dir = config, run_dir
        self.clock = Clock("learner", "other")
        parts = assemble(config, ranks)
        self._policy, self._trainer, self._computes = parts.policy, parts.trainer, parts.computes
        self._gate = Gate(config.learner.batch, config.staleness.start_depth, config.staleness.cutoff)
        self._version = checkpoint.load_newest(run_dir.checkpoints, self._computes.load)
        self._computes.keep_in(run_dir.checkpoints, config.learner.checkpoints)
        self._saver = parts.worker.saver
        self._saved = self._settled = self._version
        nbytes = sum(tensor.numel() * 4 for tensor in self._policy.parts().values())
        self._publisher = Publisher(weights_directory(config, run_dir, nbytes))
        url = (run_dir.root / "queue.url").read_text().strip()
        self._client = LearnerClient(url, version=self._version)
        self._beats = LearnerBeats(url, self.clock)
        self._metrics = MetricsWriter(run_dir, config)
        self._report = Report(self._client, self.clock)
        self._recorder = Recorder(config, run_dir)
        self._stopping = False
        self._exhausted = False  # the queue says that no more groups will come
        self._dropped: Counter[str] = Counter()  # groups out of the batch since the last step, by reason
        self._seen: list[Seen] = []  # all groups taken since the last step

    def stop(self, number: int, frame: FrameType | None) -> None:
        log.info("asked to stop: finishes the micro-batch, saves, leaves")
        self._stopping = True
        self._client.give_up_after = LEAVE_SECONDS

    def close(self) -> None:
        self._computes.leave()
        self._metrics.close()
        self._beats.close()
        self._client.close()
        self._publisher.close()

    def train(self) -> int:
        try:
            self._publish()
            while self._version < self._config.run.steps and not self._exhausted:
                batch = self._collect()
                if not batch or not self._step(batch):
                    break
            self._save_last()
            self._announce()
            if self._version >= self._config.run.steps or self._exhausted:
                self._finish()
        except QueueAway as away:  # only once it is asked to stop
            log.warning("leaves without the queue: %s", away)
            # A version whose groups the queue may not have booked is not kept: they would be trained on twice.
            if self._version == self._settled:
                self._save_last()
        self.clock.enter("other")
        log.info("leaves at version %d", self._version)
        return 0

    def _collect(self) -> list[Candidate] | None:
        """A batch of groups with signal, or what is left of the data, added to the step; None when asked to stop."""
        batch: list[Candidate] = []
        self._trainer.begin(self._version)
        self._dropped.clear()
        self._seen.clear()
        size = self._config.learner.batch
        began = said = time.monotonic()
        why = ""
        while len(batch) < size:
            if self._stopping:
                return None
            self.clock.enter("waiting for data", why)
            groups, why = self._client.take(size - len(batch), TAKE_SECONDS)
            self.clock.enter("other")
            before = len(batch)
            for group, batches in groups:
                verdict = judge(group, batches, self._config.outcomes, self._gate, self._version)
                self._seen.append(verdict.seen)
                if isinstance(verdict, Dropped):  # out of the batch, and its place in the gate is free at once
                    self._client.settle([verdict.group], verdict.fates)
                    self._dropped[verdict.reason] += 1
                else:
                    batch.append(verdict)
                    self.clock.enter("forward/backward")
                    self._trainer.add(verdict, stopping=lambda: self._stopping)
                    self.clock.enter("other")
            if not groups and self._client.done:
                log.info("%s: the last batch has %d of %d groups", why, len(batch), size)
                self._exhausted = True
                break
            now = time.monotonic()
            if len(batch) > before:
                said = now
            elif now - said > SAY_EVERY:
                said = now
                log.warning("%s", waiting_line(len(batch), size, now - began, self._dropped, self._seen, why))
        return batch

    def _step(self, batch: list[Candidate]) -> bool:
        """False when it was cut short by being asked to stop; the queue then hands the batch out again."""
        self.clock.enter("forward/backward")
        made = self._trainer.finish(stopping=lambda: self._stopping)
        if made is None:
            return False
        stats, fates = made
        if stats.skipped:
            log.warning("step %d: gradient is not finite (%s); parameters stay", self._version + 1, stats.grad_norm)
        self._version += 1
        publish_s = self._publish(self._report.pace(stats))
        self._client.settle([candidate.group for candidate in batch], fates, self._version)
        self._settled = self._version
        self.clock.enter("other")
        values = self._report.values(stats, self._seen, self._dropped, publish_s)
        self._metrics.log(self._version, values)  # before the queue is spoken with again: it may be away for good
        log.info("%s", self._report.line(self._version, self._config.run.steps, stats, values))
        self._announce()
        if self._recorder.wanted:
            self._recorder.write(self._version, self._trainer.tokens())
        every = self._config.learner.checkpoint_every
        if every and self._version % every == 0:
            self._save()
        return True

    def _publish(self, step: StepPace | None = None) -> float:
        """Seconds it took."""
        began = time.monotonic()
        self.clock.enter("publishing")
        self._client.publish(self._publisher.publish(self._version, self._computes.tensors()), step)
        self.clock.enter("other")
        return time.monotonic() - began

    def _save(self) -> None:
        """Begins to; the queue hears of it when it is on disk."""
        self.clock.enter("checkpoint")
        self._computes.save(self._version)
        self._saved = self._version

    def _announce(self) -> None:
        """What was consumed for all the checkpoints on disk is not handed out again."""
        if (final := self._saver.final()) is not None:
            self._client.checkpointed(final)

    def _save_last(self) -> None:
        """Returns when it is on disk. Also without a queue, which hears of it when the next learner says hello."""
        if self._version > self._saved:
            self._save()
        self.clock.enter("checkpoint")
        self._saver.wait()

    def _finish(self) -> None:
        """The model as a folder, and the last version where it can be read when this process is gone."""
        self.clock.enter("checkpoint")
        start = Path(self._config.model.path)
        write_folder(self._run_dir.checkpoints / "final", self._policy, self._computes.tensors(), start)
        if not self._publisher.temporary:
            return
        self.clock.enter("publishing", why="rollouters load the last version")
        lasting = Publisher(self._run_dir.weights)
        self._client.publish(lasting.publish(self._version, self._computes.tensors()))
        until = time.monotonic() + HAND_OVER_SECONDS
        while behind := [beat.name for beat in self._client.status().rollouters if beat.version < self._version]:
            if self._stopping or time.monotonic() > until:
                log.warning("leaves before %s loaded version %d", ", ".join(behind), self._version)
                return
            time.sleep(POLL_SECONDS)

"""The supervisor: starts queue, rollouters and learner, keeps them going, and sees the run through to its summary.

Invariant: when `run` returns, no process of the run is left. What died is started again, with back-off, at most
`run.restarts` times; a child that met a user's error ends the run with its words. Every wait has a name, shown.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from slipstream.config import Config, RunDir
from slipstream.launch.child import Child
from slipstream.launch.record import Record
from slipstream.observe.panel import Display
from slipstream.parent import adopt_orphans
from slipstream.queue.client import QueueClient
from slipstream.queue.messages import HeldoutResult, Status

log = logging.getLogger(__name__)

TICK = 0.5
START_SECONDS = 60.0  # for the queue to be there
QUIET_SECONDS = 60.0  # without a delivery or a step before the run says for what it waits
ALL_FAILED = 64  # trajectories, all failed, after which going on is no use
GRACE = {"learner": 60.0, "queue": 10.0}  # seconds from SIGTERM to SIGKILL; rollouters 10


class RunFailed(Exception):
    """Ends the run; `code` is the exit code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Stopped(Exception):
    """Ctrl-C or SIGTERM."""


def run(config: Config, run_dir: RunDir) -> int:
    """Everything of a run on this machine. Returns the exit code: 0, 1 (gave up), 2 (user's error), 130 (stopped)."""
    adopt_orphans()
    run_dir.logs.mkdir(parents=True, exist_ok=True)
    (run_dir.root / "queue.url").unlink(missing_ok=True)  # of an earlier start in this directory
    return asyncio.run(Supervisor(config, run_dir, Console()).run())


class Supervisor:
    def __init__(self, config: Config, run_dir: RunDir, console: Console) -> None:
        self._config, self._run_dir = config, run_dir
        self._display = Display(console)
        self._record = Record(config, run_dir)
        self._queue = self._child("queue")
        self._learner = self._child("learner")
        self._rollouters = [self._child("rollouter", f"rollouter-{i}") for i in range(config.engine.rollouters)]
        self._signals = 0  # Ctrl-C or SIGTERM so far: the first ends the run in order, the second at once
        self._moved = time.monotonic()

    def _child(self, role: str, name: str = "") -> Child:
        command = ["slipstream", role, str(self._run_dir.config), "--dir", str(self._run_dir.root)]
        name = name or role
        return Child(
            name, command + (["--name", name] if role == "rollouter" else []), self._run_dir.logs / f"{name}.log"
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        code, why = 0, ""
        with self._display:
            self._display.say(f"run directory: {self._run_dir.root}")
            try:
                await self._course()
            except Stopped:
                code, why = 130, "stopped"
            except RunFailed as failed:
                code, why = failed.code, str(failed)
            finally:
                await self._stop_all()
        summary = self._record.summary(self._restarts())
        summary.write(self._run_dir.summary)
        if code != 2:
            summary.show(self._display.console, self._run_dir.summary)
        if why:
            self._display.console.print(f"slipstream: {why}", markup=False, highlight=False, soft_wrap=True)
        if code == 0 and not summary.accounts_hold:
            return 1
        return code

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._display.say("stopping; once more to stop at once")

    # -- the course of a run -------------------------------------------------------------------------------------------

    async def _course(self) -> None:
        self._queue.start()
        # Imports take the longest: begin with them all. They wait for the queue by themselves.
        for child in (self._learner, *self._rollouters):
            child.start()
        url = await self._queue_url()
        async with QueueClient(url, role="observer", name="supervisor") as client:
            if self._config.tasks.heldout and not (await client.status()).heldout:
                await client.evaluate(0)
            await self._train(client)
            status = await client.status()
            if self._config.tasks.heldout and not _result(status, status.version):
                await client.evaluate(status.version)
            await self._until(client, "evaluates the last version", self._evaluated, learner=False)
            await client.drain(done=True)
            self._record.observe(await client.status())

    async def _queue_url(self) -> str:
        began = time.monotonic()
        while not (url := read_url(self._run_dir.root / "queue.url")):
            self._tend([self._queue, self._learner, *self._rollouters])
            if time.monotonic() - began > START_SECONDS:
                raise RunFailed(1, f"the queue did not come up in {START_SECONDS:.0f} s:\n{self._queue.last_words()}")
            await self._tick()
        return url

    async def _train(self, client: QueueClient) -> None:
        await self._until(client, "starts: engine and learner load", lambda status: status.trajectories.generated > 0)
        self._record.training_began()
        await self._until(client, "trains", lambda _: self._learner.ended() == 0)
        self._record.training_ended()

    def _evaluated(self, status: Status) -> bool:
        result = _result(status, status.version)
        return result is None or result.ended >= result.tasks

    async def _until(
        self, client: QueueClient, stage: str, done: Callable[[Status], bool], *, learner: bool = True
    ) -> None:
        """Watch everybody and show progress until `done(status)`."""
        while True:
            if learner and self._learner.ended() == 0:
                return
            self._tend([self._queue, *self._rollouters, *([self._learner] if learner else [])])
            status = await self._status(client)
            if status is not None:
                if self._record.observe(status):
                    self._moved = time.monotonic()
                self._give_up_if_all_failed(status)
                self._display.update(self._record.progress(stage, self._restarts()))
                if done(status):
                    return
            self._say_if_quiet()
            await self._tick()

    async def _status(self, client: QueueClient) -> Status | None:
        """None while the queue is away: its restart is what this loop sees to."""
        try:
            async with asyncio.timeout(2.0):
                return await client.status()
        except TimeoutError:
            return None

    async def _tick(self) -> None:
        if self._signals:
            raise Stopped
        await asyncio.sleep(TICK)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _tend(self, children: list[Child]) -> None:
        """Start again what died. Raises RunFailed when that is no use."""
        for child in children:
            if not child.started:
                if time.monotonic() >= child.not_before:
                    child.start()
                continue
            code = child.ended()
            if code is None or (child is self._learner and code == 0):
                continue
            if code == 2:
                raise RunFailed(2, child.last_words(1).removeprefix("slipstream: "))
            if self._restarts() >= self._config.run.restarts:
                raise RunFailed(
                    1,
                    f"{child.name} ended with {_said(code)}; run.restarts = {self._config.run.restarts} are used up; "
                    f"the end of {child.log}:\n{child.last_words()}",
                )
            wait = min(30.0, 2.0**child.restarts - 1)
            child.restarts += 1
            child.not_before = time.monotonic() + wait
            child.forget()
            self._display.say(f"{child.name} ended with {_said(code)}; it is started again in {wait:.0f} s")

    def _restarts(self) -> int:
        return sum(child.restarts for child in self._children())

    def _children(self) -> list[Child]:
        return [*self._rollouters, self._learner, self._queue]

    async def _stop_all(self) -> None:
        """Rollouters first, then the learner, the queue last: each may still speak with those after it."""
        for group in (self._rollouters, [self._learner], [self._queue]):
            for child in group:
                child.ask()
            deadline = time.monotonic() + max(GRACE.get(child.name, 10.0) for child in group)
            while any(child.started and child.ended() is None for child in group):
                if self._signals > 1 or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
            for child in group:
                child.kill()

    # -- watching ------------------------------------------------------------------------------------------------------

    def _give_up_if_all_failed(self, status: Status) -> None:
        failed = sum(status.trajectories.failed.values())
        if failed >= ALL_FAILED and failed == status.trajectories.generated:
            kinds = ", ".join(f"{count} {outcome}" for outcome, count in status.trajectories.failed.items())
            raise RunFailed(
                1, f"all {failed} trajectories so far failed ({kinds}); see {self._rollouters[0].log} for the reason"
            )

    def _say_if_quiet(self) -> None:
        quiet = time.monotonic() - self._moved
        if quiet > QUIET_SECONDS:
            self._display.say(f"nothing moved for {quiet:.0f} s: {self._record.waits()}")
            self._moved = time.monotonic()


def read_url(path: Path) -> str:
    """What the queue wrote there, '' before it did."""
    return path.read_text().strip() if path.is_file() else ""


def _result(status: Status, version: int) -> HeldoutResult | None:
    return next((result for result in status.heldout if result.version == version), None)


def _said(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

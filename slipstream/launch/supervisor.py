"""The supervisor: starts queue, rollouters and learner, keeps them going, and sees the run through to its summary.

Invariant: when `run` returns, no process of the run is left. What died is started again, with back-off, at most
`run.restarts` times; a child that met a user's error ends the run with its words. Every wait has a name, shown.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from slipstream.config import Config, RunDir
from slipstream.launch.child import Child
from slipstream.launch.record import Record
from slipstream.observe.panel import Display
from slipstream.parent import adopt_orphans
from slipstream.queue.client import QueueClient
from slipstream.queue.messages import Status

log = logging.getLogger(__name__)

TICK = 0.5
START_SECONDS = 60.0  # for the queue to be there
QUIET_SECONDS = 60.0  # without a delivery or a step before the run says for what it waits
ALL_FAILED = 64  # trajectories, all failed, after which going on is no use
GRACE, LEARNER_GRACE = 10.0, 60.0  # seconds from SIGTERM to SIGKILL; the learner finishes and saves
REPORT_SECONDS = 300.0  # for the page at the end; a day of trajectories takes about half a minute
KILL_SECONDS = 10.0  # from SIGKILL to giving up on a process that the kernel does not end
STATUS_SECONDS = 2.0  # for the queue to answer before it counts as away

T = TypeVar("T")


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
        self._client: QueueClient | None = None  # once the queue is there
        self._model = run_dir.checkpoints / "final"  # which the learner writes at the end of training
        self._model_before = _mark(self._model)
        self._signals = 0  # Ctrl-C or SIGTERM so far: the first ends the run in order, the second at once
        self._moved = time.monotonic()
        self._say_barren_from = 0.0  # monotonic

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
        async with AsyncExitStack() as connections:
            connections.enter_context(self._display)
            self._display.say(f"run directory: {self._run_dir.root}")
            try:
                await self._course(connections)
            except Stopped:
                code, why = 130, "stopped"
            except RunFailed as failed:
                code, why = failed.code, str(failed)
            finally:
                await self._stop_all()
        summary = self._record.summary(self._restarts())
        if code == 0 and not summary.accounts_hold:
            code, why = 1, f"the accounts do not hold: {summary.accounts}"
        summary.write(self._run_dir.summary)
        if code != 2:
            summary.show(self._display.console, self._run_dir.summary)
            await self._report()
        if why:
            self._display.console.print(f"slipstream: {why}", markup=False, highlight=False, soft_wrap=True)
        return code

    async def _report(self) -> None:
        """RUN/report.html, by a process of its own: whatever it comes to, the run ended as it did."""
        child, signals = (
            Child("report", ["slipstream", "report", str(self._run_dir.root)], self._run_dir.logs / "report.log"),
            self._signals,
        )
        if signals > 1:
            return
        self._display.say("making the report; Ctrl-C leaves it out")
        child.start()
        await self._gone([child], REPORT_SECONDS, lambda: self._signals > signals)
        if (code := child.ended()) == 0:
            said = f"report: {self._run_dir.report}"
        elif code is None:
            child.kill()
            await self._gone([child], KILL_SECONDS, lambda: False)
            said = f"no report; to make it: slipstream report {self._run_dir.root}"
        else:
            said = f"no report: {child.complaint()}"
        self._display.console.print(said, markup=False, highlight=False, soft_wrap=True)

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._display.say("stopping; once more to stop at once")

    # -- the course of a run -------------------------------------------------------------------------------------------

    async def _course(self, connections: AsyncExitStack) -> None:
        # Imports take the longest: begin with them all. They wait for the queue by themselves.
        for child in (self._queue, self._learner, *self._rollouters):
            self._start(child)
        connecting = QueueClient(await self._queue_url(), role="observer", name="supervisor")
        client = self._client = await self._answer(connections.enter_async_context(connecting))
        if self._config.tasks.heldout and not (await self._answer(client.status())).heldout:
            await self._answer(client.evaluate(0))
        await self._until("starts: engine and learner load", self._training)
        self._record.training_began()
        await self._until("trains", lambda _: self._trained())
        self._record.training_ended()
        version = (await self._answer(client.status())).version
        if self._config.tasks.heldout:
            await self._answer(client.evaluate(version))  # which does nothing when it was asked for already
            await self._until("evaluates the last version", lambda status: _evaluated(status, version))
        await self._answer(client.drain(done=True), [self._queue])  # the others leave now

    def _training(self, status: Status) -> bool:
        return status.trajectories.generated > 0 or self._trained()

    def _trained(self) -> bool:
        """The learner left because it is through: then it left the model. It also leaves, and is started again, when
        somebody asked it to (SIGTERM)."""
        return self._learner.ended() == 0 and _mark(self._model) != self._model_before

    async def _queue_url(self) -> str:
        began = time.monotonic()
        while not (url := read_url(self._run_dir.root / "queue.url")):
            self._tend([self._queue, self._learner, *self._rollouters])
            if time.monotonic() - began > START_SECONDS:
                raise RunFailed(1, f"the queue did not come up in {START_SECONDS:.0f} s:\n{self._queue.last_words()}")
            await self._tick()
        return url

    async def _until(self, stage: str, done: Callable[[Status], bool]) -> None:
        """Watch everybody and show progress until `done(status)`."""
        while True:
            self._tend(self._children())
            status = await self._status()
            if status is not None:
                if self._record.observe(status):
                    self._moved = time.monotonic()
                self._give_up_if_all_failed(status)
                self._display.update(self._record.progress(stage, self._restarts()))
                if done(status):
                    return
            self._say_if_quiet()
            await self._tick()

    async def _answer(self, request: Coroutine[Any, Any, T], tended: list[Child] | None = None) -> T:
        """What the queue answers. Until then everybody is watched: it may have to be started again to answer."""
        asking = asyncio.create_task(request)
        try:
            while not asking.done():
                self._tend(tended or self._children())
                self._say_if_quiet()
                self._heed_signals()
                await asyncio.wait([asking], timeout=TICK)
            return asking.result()
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _status(self) -> Status | None:
        """None while the queue is away: its restart is what the caller sees to."""
        assert self._client is not None
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                return await self._client.status()
        except TimeoutError:
            return None

    def _heed_signals(self) -> None:
        if self._signals:
            raise Stopped

    async def _tick(self) -> None:
        self._heed_signals()
        await asyncio.sleep(TICK)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start(self, child: Child) -> None:
        if child is self._learner:
            self._model_before = _mark(self._model)
        child.start()

    def _tend(self, children: list[Child]) -> None:
        """Start again what died. Raises RunFailed when that is no use."""
        for child in children:
            if not child.started:
                if time.monotonic() >= child.not_before:
                    self._start(child)
                continue
            code = child.ended()
            if code is None or (child is self._learner and self._trained()):
                continue
            if code == 2:
                raise RunFailed(2, child.complaint())
            if self._restarts() >= self._config.run.restarts:
                raise RunFailed(
                    1,
                    f"{child.name} ended with {_said(code)}; run.restarts = {self._config.run.restarts} are used up; "
                    f"the end of {child.log}:\n{child.last_words()}",
                )
            self._say_left(child)
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
        await self._stop(self._rollouters, GRACE)
        await self._stop([self._learner], LEARNER_GRACE)
        status = await self._status() if self._client is not None and self._signals < 2 else None
        if status is not None:
            self._record.observe(status)  # with what the others did last
        await self._stop([self._queue], GRACE)
        if status is None:
            self._record.read_journal()

    async def _stop(self, children: list[Child], grace: float) -> None:
        """SIGTERM, and SIGKILL after `grace` seconds, or at once after a second Ctrl-C."""
        for child in children:
            child.ask()
        if await self._gone(children, grace, lambda: self._signals > 1):
            return
        for child in children:
            child.kill()
        if not await self._gone(children, KILL_SECONDS, lambda: False):
            names = ", ".join(f"{child.name} (pid {child.pid})" for child in children if child.ended() is None)
            self._display.say(f"{names} did not end within {KILL_SECONDS:.0f} s of SIGKILL")
        for child in children:
            self._say_left(child)

    async def _gone(self, children: list[Child], seconds: float, hurry: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while any(child.started and child.ended() is None for child in children):
            if hurry() or time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def _say_left(self, child: Child) -> None:
        if child.left:
            pids = ", ".join(str(pid) for pid in child.left)
            self._display.say(f"of {child.name}, processes {pids} are left although they were killed")

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
        elif time.monotonic() > self._say_barren_from and (why := self._record.barren(QUIET_SECONDS)):
            self._display.say(why)
            self._say_barren_from = time.monotonic() + QUIET_SECONDS


def read_url(path: Path) -> str:
    """What the queue wrote there, '' before it did."""
    return path.read_text().strip() if path.is_file() else ""


def _evaluated(status: Status, version: int) -> bool:
    return any(result.version == version and result.ended >= result.tasks for result in status.heldout)


def _mark(folder: Path) -> tuple[int, int]:
    """Differs once the folder is made anew."""
    try:
        stat = folder.stat()
    except FileNotFoundError:
        return 0, 0
    return stat.st_ino, stat.st_ctime_ns


def _said(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

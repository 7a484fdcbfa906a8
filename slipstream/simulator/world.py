"""The run on a virtual clock: events in the order of their times, and the real ledger between rollouters and learner.

Invariant: nothing here decides who may generate, what is too old or what is consumed: the ledger, the gate and the
staleness arithmetic of a real run do. The virtual clock only moves forward.
"""

import gc
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np

from slipstream.config import (
    Config,
    EnvironmentSection,
    LearnerSection,
    ModelSection,
    QueueSection,
    RolloutSection,
    RunSection,
    StalenessSection,
    TasksSection,
)
from slipstream.errors import UserError
from slipstream.queue.events import Place
from slipstream.queue.ledger import Ledger
from slipstream.queue.messages import Lease
from slipstream.queue.row import Row
from slipstream.queue.state import LedgerState
from slipstream.queue.tasks import TaskOrder
from slipstream.simulator.fleet import Engine, Request
from slipstream.simulator.scenario import TOKENS, Scenario
from slipstream.simulator.tally import Result, Tally
from slipstream.simulator.training import Training
from slipstream.task import Task
from slipstream.trajectory import Outcome

TASKS = 1000  # the part of a mixture that a task belongs to is its share of these
NOWHERE = Place(0, 0, 0)
PATIENCE = 100  # batches' worth of trajectories that come to nothing: it never ends
FOREVER = 10**9  # steps: the end of a run is not simulated

Action = Callable[[], None]


def simulate(scenario: Scenario) -> Result:
    """Runs until `scenario.batches` steps are made."""
    with _undisturbed():
        return World(scenario).run()


@contextmanager
def _undisturbed() -> Generator[None]:
    """The ledger warns of each failure: here they are made on purpose, and counted. And nothing here is a cycle that
    the garbage collector would have to look for: it takes a quarter of the time."""
    ledgers = logging.getLogger("slipstream.queue.ledger")
    before, ledgers.disabled = ledgers.disabled, True
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        ledgers.disabled = before
        if collects:
            gc.enable()


class World:
    def __init__(self, scenario: Scenario) -> None:
        self._is = scenario
        self._now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._number = itertools.count()  # of events, and of requests to the ledger
        self._tally = Tally()
        self._draws(np.random.default_rng(scenario.seed))
        self._ledger = made_ledger(scenario)
        self._training = Training(self._ledger, self._tally, scenario.batch, scenario.cutoff, self._has_signal)
        pace = scenario.decode_s if scenario.latency is None else scenario.length.mean() / TOKENS
        each = scenario.decode_request_s if scenario.latency is None else 0.0
        self._engines = [
            Engine(f"rollouter-{number}", scenario.concurrency, pace, each, scenario.updates_in_flight)
            for number in range(scenario.rollouters)
        ]
        self._asking: deque[Engine] = deque()
        self._closed = False  # the last one that asked got nothing, and nothing has changed since
        self._working = False
        self._since_step = 0  # trajectories delivered
        self._idle_since = 0.0
        self._waited = self._stepped = 0.0  # seconds for data since the last step; when that was
        self._slots_used = self._slots_at_tools = 0
        self._slots_since = 0.0

    def _draws(self, random: np.random.Generator) -> None:
        scenario = self._is
        streams = iter(random.spawn(6))
        self._length = scenario.length.drawer(next(streams))
        self._turns = scenario.turns.drawer(next(streams))
        self._tool_s = scenario.tool_s.drawer(next(streams))
        self._step_s = scenario.step_s.drawer(next(streams))
        self._random = next(streams)
        # Tokens of a trajectory whose seconds are drawn.
        self._scale = 1.0 if scenario.latency is None else TOKENS / scenario.length.mean()

    def _has_signal(self) -> bool:
        return not self._is.zero_signal or self._random.random() >= self._is.zero_signal

    # -- time ----------------------------------------------------------------------------------------------------------

    def _at(self, when: float, action: Action) -> None:
        heapq.heappush(self._events, (when, next(self._number), action))

    def run(self) -> Result:
        began = time.perf_counter()
        for engine in self._engines:
            self._ledger.hello("rollouter", engine.name, next(self._number), 0, self._now)
            engine.load(0, self._now, 0.0)
            self._ask(engine)
        if self._is.crash_s:
            self._plan_crash()
        self._pump()
        counted_from = self._is.batches // 10
        while self._training.version < self._is.batches:
            if not self._tally.counting and self._training.version >= counted_from:
                self._begin_counting()
            self._now, _, action = heapq.heappop(self._events)
            action()
            self._ledger.events.clear()
        return self._result(time.perf_counter() - began)

    def _begin_counting(self) -> None:
        self._use_slots(0)
        tally = self._tally
        tally.began, tally.counting, self._idle_since = self._now, True, self._now
        tally.busy_s = tally.waiting_s = tally.slot_s = tally.tool_s = 0.0
        for engine in self._engines:
            engine.paused = 0.0

    def _result(self, wall_s: float) -> Result:
        self._use_slots(0)
        tokens, trajectories = self._ledger.state.accounts()
        self._tally.steps = self._is.batches - self._is.batches // 10
        self._tally.paused_s = sum(engine.paused for engine in self._engines)
        return self._tally.result(
            now=self._now,
            depth=self._ledger.status().depth,
            slots=self._is.slots,
            engines=self._is.rollouters,
            accounts=tokens,
            holds=tokens.holds() and trajectories.holds(),
            wall_s=wall_s,
            delivered=trajectories.generated,
        )

    def _use_slots(self, change: int, at_tools: int = 0) -> None:
        """So many more slots hold a trajectory from here on, and so many more of those wait for a tool."""
        seconds = self._now - self._slots_since
        self._tally.slot_s += seconds * self._slots_used
        self._tally.tool_s += seconds * self._slots_at_tools
        self._slots_since = self._now
        self._slots_used += change
        self._slots_at_tools += at_tools

    # -- rollouters ----------------------------------------------------------------------------------------------------

    def _ask(self, engine: Engine) -> None:
        if not engine.asking:
            engine.asking = True
            self._asking.append(engine)

    def _open(self) -> None:
        """Something changed that may let leases flow."""
        self._closed = False
        self._pump()

    def _pump(self) -> None:
        """Leases to those that asked first, as long as there are any."""
        while self._asking and not self._closed:
            engine = self._asking[0]
            room = engine.room
            if room > 0:
                granted = self._ledger.ask(engine.name, room, next(self._number), self._now).leases
                self._use_slots(len(granted))
                for lease in granted:
                    self._accept(engine, lease)
                if len(granted) < room:  # there are no more
                    self._closed = True
                    return
            engine.asking = False
            self._asking.popleft()

    def _accept(self, engine: Engine, lease: Lease) -> None:
        share = (int(lease.task.id) + 0.5) / TASKS
        turns = max(1, round(self._turns(share)))
        length = max(turns, round(self._length(share) * self._scale))
        request = Request(lease, length, turns)
        engine.requests.add(request)
        if engine.version < lease.min_version:
            engine.waiting.append(request)
        else:
            self._begin_turn(engine, request)

    def _begin_turn(self, engine: Engine, request: Request) -> None:
        if self._is.prefill_s:
            engine.stall(self._now, self._is.prefill_s)
        if engine.begin_turn(request, self._now) or self._is.prefill_s:
            self._plan(engine)

    def _plan(self, engine: Engine) -> None:
        """The engine's next end of a turn, in place of what was planned."""
        engine.epoch += 1
        if engine.active:
            epoch = engine.epoch
            self._at(engine.next_end(self._now), lambda: self._end_turn(engine, epoch))

    def _end_turn(self, engine: Engine, epoch: int) -> None:
        if epoch != engine.epoch:
            return
        request = engine.end_turn(self._now)
        if request.left:
            seconds = self._tool_s((int(request.lease.task.id) + 0.5) / TASKS)
            self._use_slots(0, at_tools=1)
            self._at(self._now + seconds, lambda: self._tool_done(engine, request))
        else:
            self._deliver(engine, request)
        self._plan(engine)

    def _tool_done(self, engine: Engine, request: Request) -> None:
        self._use_slots(0, at_tools=-1)
        if request in engine.requests:  # or it was lost in a crash
            self._begin_turn(engine, request)

    def _deliver(self, engine: Engine, request: Request) -> None:
        lease = request.lease
        failed = self._is.failure > 0 and self._random.random() < self._is.failure
        outcome = Outcome.ENGINE_FAILED if failed else Outcome.FINISHED
        reward = None if failed else 1.0
        runs = engine.runs(request)
        row = Row(lease.lease, lease.group, lease.task.id, lease.attempt, request.length, runs, outcome, reward)
        engine.requests.remove(request)
        self._use_slots(-1)
        if self._tally.counting:
            self._tally.generated += request.length
        assert self._ledger.expects(row)
        self._ledger.deliver(row, NOWHERE)
        self._since_step += 1
        if self._since_step > PATIENCE * (self._is.batch * self._is.group + self._is.slots):
            raise UserError(
                f"cutoff = {self._is.cutoff}, failure = {self._is.failure}, zero_signal = {self._is.zero_signal}: "
                f"{self._since_step} trajectories came and batch {self._training.version + 1} is not complete: raise "
                "the cutoff, or lower the others"
            )
        self._ask(engine)
        if failed:  # it is granted anew, or its group is given up
            self._closed = False
        self._pump()
        if not self._working:
            self._collect()

    # -- weights -------------------------------------------------------------------------------------------------------

    def _load(self, version: int) -> None:
        pause = self._is.sync_s
        for engine in self._engines:
            if engine.alive:
                self._load_one(engine, version, pause)

    def _load_one(self, engine: Engine, version: int, pause: float) -> None:
        engine.load(version, self._now, pause)
        held, engine.waiting = engine.waiting, []
        for request in held:
            if request.lease.min_version > version:
                engine.waiting.append(request)
            else:
                self._begin_turn(engine, request)
        if pause and not held:
            self._plan(engine)

    # -- crashes -------------------------------------------------------------------------------------------------------

    def _plan_crash(self) -> None:
        seconds = self._random.exponential(self._is.crash_s / len(self._engines))
        self._at(self._now + seconds, self._crash)

    def _crash(self) -> None:
        engine = self._engines[int(self._random.integers(len(self._engines)))]
        if engine.alive:
            lost = engine.crash()
            self._use_slots(-len(lost))
            self._ledger.give_back(engine.name, [request.lease.lease for request in lost], "owner gone")
            self._at(self._now + self._is.restart_s, lambda: self._restart(engine))
            self._open()
        self._plan_crash()

    def _restart(self, engine: Engine) -> None:
        self._ledger.hello("rollouter", engine.name, next(self._number), 0, self._now)
        engine.alive = True
        self._load_one(engine, self._training.version, 0.0)
        self._ask(engine)
        self._pump()

    # -- learner -------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """The learner is free: it judges what is ready, works on what comes into the batch, and steps when it is
        complete. What it refunds is free to be opened at once."""
        while self._training.missing:
            verdict = self._training.judge()
            if verdict == "none":
                return
            if verdict == "refunded":
                self._open()
            elif self._is.group_s:
                return self._work(self._is.group_s, self._worked)
        self._work(self._step_s(0.0), self._step)

    def _worked(self) -> None:
        self._working, self._idle_since = False, self._now
        self._collect()

    def _work(self, seconds: float, then: Action) -> None:
        self._waited += self._now - self._idle_since
        if self._tally.counting:
            self._tally.waiting_s += self._now - self._idle_since
            self._tally.busy_s += seconds
        self._working = True
        self._at(self._now + seconds, then)

    def _step(self) -> None:
        self._training.step(self._waited / max(1e-12, self._now - self._stepped))
        self._waited, self._stepped = 0.0, self._now
        self._since_step = 0
        version = self._training.version
        if self._is.publish_s:
            self._at(self._now + self._is.publish_s, lambda: self._load(version))
        else:
            self._load(version)
        self._open()
        self._worked()


def made_ledger(scenario: Scenario, state: LedgerState | None = None) -> Ledger:
    """The real one, of a run that has the scenario's settings; `state` is what it came to before."""
    tasks = [Task(id=str(number), prompt="") for number in range(TASKS)]
    return Ledger(_config(scenario), TaskOrder(tasks, seed=scenario.seed), state)


def _config(scenario: Scenario) -> Config:
    """What the ledger reads of a run's config."""
    return Config(
        model=ModelSection(path=""),
        environment=EnvironmentSection(path=""),
        tasks=TasksSection(train=""),
        run=RunSection(name="simulated", seed=scenario.seed, steps=FOREVER),
        rollout=RolloutSection(group=scenario.group, concurrency=scenario.concurrency),
        staleness=StalenessSection(depth=scenario.depth, cutoff=scenario.cutoff),
        queue=QueueSection(selection=scenario.selection),
        learner=LearnerSection(batch=scenario.batch),
    )

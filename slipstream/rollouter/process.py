"""The rollouter process: leases in, trajectories out, weights received in flight.

Invariant: a lease that this process holds ends in exactly one delivery or one return; a trajectory never starts on
weights older than its lease allows; the process holds no more trajectories than it has leases (no lease, no work).
"""

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Coroutine

from slipstream.agent_loop.environment import load_environment
from slipstream.agent_loop.loop import AgentLoop
from slipstream.agent_loop.parking import CannotGoOn
from slipstream.agent_loop.renderer import create_renderer
from slipstream.agent_loop.sampler import EngineFailed
from slipstream.config import Config, RunDir
from slipstream.observe.clock import Clock
from slipstream.queue.client import QueueClient
from slipstream.queue.messages import Lease, RollouterBeat
from slipstream.rollouter.activity import Stage, part
from slipstream.rollouter.engine import Engine, WeightsRejected, prepare_environment
from slipstream.rollouter.failures import Failures
from slipstream.trajectory import Trajectory

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
LEAVE_SECONDS = 5.0  # when this process ends, how long a queue that is away is waited for
ASK_SECONDS = 5.0  # how long one request for leases or weights waits at the queue before it is made again


def run(config: Config, run_dir: RunDir, name: str) -> int:
    """Run until the queue says that the run is over, or SIGTERM. Returns the exit code."""
    prepare_environment(config.engine)
    import uvloop

    return uvloop.run(_serve(config, run_dir, name))


async def _serve(config: Config, run_dir: RunDir, name: str) -> int:
    clock = Clock(name, "starting")
    # The engine process is forked before this process has sockets or threads of its own.
    engine = Engine.start(config.model.path, config.model.dtype, config.engine, config.rollout.concurrency)
    log.info("engine is up: %s, %d at once", config.model.path, config.rollout.concurrency)
    try:
        url = (run_dir.root / "queue.url").read_text().strip()
        async with QueueClient(url, role="rollouter", name=name) as client:
            return await Rollouter(config, engine, client, clock, name).serve()
    finally:
        engine.shutdown()


class Rollouter:
    """Keeps up to `rollout.concurrency` trajectories going on one engine."""

    def __init__(self, config: Config, engine: Engine, client: QueueClient, clock: Clock, name: str) -> None:
        environment = load_environment(config.environment.path)
        renderer = create_renderer(config.model.path)
        self._agents = AgentLoop(environment, renderer, engine, config.rollout, self._on_tools, self._on_park)
        young, old, _ = gc.get_threshold()
        # A full collection looks through all that was imported, and the event loop stands still for that long.
        gc.set_threshold(young, old, 1000)
        self._engine, self._client, self._clock, self._name = engine, client, clock, name
        self._concurrency = config.rollout.concurrency
        self._leases: dict[int, Stage] = {}  # that this process holds, and what their trajectories are at
        self._failures = Failures()
        self._changed = asyncio.Condition()  # notified when a trajectory ends and when weights were loaded
        self._pauses: list[float] = []
        self._loading = False
        self._why = "the first weights"
        self._over = asyncio.Event()
        self._exit = 0
        self._parking = asyncio.Queue[Trajectory]()  # on their way to the queue
        engine.on_change = self._tick

    async def serve(self) -> int:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leave, 0)
        async with asyncio.TaskGroup() as everything:
            trajectories = await everything.create_task(self._until_over(everything))
            for task in list(trajectories):
                task.cancel()
        await self._agents.close()
        self._client.give_up_after = LEAVE_SECONDS
        if self._leases:  # somebody else, or a later process, makes them anew
            await self._client.give_back(list(self._leases), reason="rollouter left")
        if totals := self._failures.totals():
            log.info("what went wrong, in all: %s", totals)
        return self._exit

    async def _until_over(self, everything: asyncio.TaskGroup) -> "set[asyncio.Task[None]]":
        trajectories: set[asyncio.Task[None]] = set()
        loops = [
            everything.create_task(self._receive_weights()),
            everything.create_task(self._take_leases(everything, trajectories)),
            everything.create_task(self._beat()),
            everything.create_task(self._park()),
        ]
        await self._over.wait()
        for task in loops:
            task.cancel()
        return trajectories

    def _leave(self, code: int) -> None:
        self._exit = max(self._exit, code)
        self._over.set()

    # -- leases --------------------------------------------------------------------------------------------------------

    async def _take_leases(self, everything: asyncio.TaskGroup, trajectories: "set[asyncio.Task[None]]") -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._engine.version >= 0 and self._room() > 0)
            granted = await self._client.ask(self._room(), wait_s=ASK_SECONDS)
            self._why = granted.why
            if granted.done:
                log.info("the run is over")
                return self._leave(0)
            for lease in granted.leases:
                self._leases[lease.lease] = Stage.AGENT
                task = everything.create_task(self._produce(lease, time.time()))
                trajectories.add(task)
                task.add_done_callback(trajectories.discard)
            self._tick()

    def _room(self) -> int:
        return 0 if self._engine.dead else self._concurrency - len(self._leases)

    async def _produce(self, lease: Lease, leased: float) -> None:
        if self._engine.version < lease.min_version:
            self._enter(lease.lease, Stage.WEIGHTS)
            async with self._changed:
                await self._changed.wait_for(lambda: self._engine.version >= lease.min_version)
            self._enter(lease.lease, Stage.AGENT)
        trajectory = await self._made(lease, leased)
        self._failures.see(trajectory)
        self._enter(lease.lease, Stage.DELIVERY)
        accepted = await self._client.deliver(trajectory)
        if accepted.duplicates:
            self._failures.late(trajectory)
        async with self._changed:
            del self._leases[lease.lease]
            self._changed.notify_all()
        self._tick()

    async def _made(self, lease: Lease, leased: float) -> Trajectory:
        """From its beginning, or from where another was with it."""

        def run(parked: Trajectory | None) -> Coroutine[None, None, Trajectory]:
            return self._agents.run(
                lease=lease.lease,
                group=lease.group,
                task=lease.task,
                attempt=lease.attempt,
                seed=lease.seed,
                t_leased=leased,
                parked=parked,
            )

        if not lease.parked:
            return await run(None)
        try:
            return await run(await self._client.parked(lease.lease))
        except CannotGoOn as error:
            log.warning("lease %d (task %s) begins anew: %s", lease.lease, lease.task.id, error)
            await self._client.drop_parked(lease.lease)
            return await run(None)

    def _on_park(self, trajectory: Trajectory) -> None:
        self._parking.put_nowait(trajectory)

    async def _park(self) -> None:
        """Beside the trajectories: they do not wait for a queue that is away."""
        while True:
            parked = await self._parking.get()
            await self._client.park(parked)

    # -- weights -------------------------------------------------------------------------------------------------------

    async def _receive_weights(self) -> None:
        while True:
            newest = await self._client.weights(newer_than=self._engine.version, wait_s=ASK_SECONDS)
            if newest.weights is None or newest.weights.version == self._engine.version:
                continue
            self._loading = True
            self._tick()
            try:
                pause_ms = await self._engine.load(newest.weights)
            except (WeightsRejected, EngineFailed) as error:
                log.error("stops taking leases: %s", error)
                return self._leave(1)
            finally:
                self._loading = False
                self._tick()
            log.info("version %d loaded, generation paused %.0f ms", newest.weights.version, pause_ms)
            self._pauses.append(pause_ms)
            async with self._changed:
                self._changed.notify_all()

    # -- what others see -----------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._tick()
            pauses, self._pauses = self._pauses, []
            await self._client.beat(
                RollouterBeat(
                    name=self._name,
                    version=self._engine.version,
                    running=len(self._leases),
                    leases=list(self._leases),
                    tokens_in_flight=[self._agents.tokens_in_flight(lease) for lease in self._leases],
                    tokens_generated=self._engine.tokens_generated,
                    pause_ms=pauses,
                    clock=self._clock.reading(),
                    tools=self._agents.tool_use(),
                )
            )
            # What was sampled is delivered first, as engine_failed; what is with a tool goes back.
            if self._engine.dead and Stage.DELIVERY not in self._leases.values():
                log.error("the engine's process is gone; this one ends, and is started again where a supervisor is")
                return self._leave(1)
            await asyncio.sleep(BEAT_SECONDS)

    def _on_tools(self, lease: int, busy: bool) -> None:
        self._enter(lease, Stage.TOOLS if busy else Stage.AGENT)

    def _enter(self, lease: int, stage: Stage) -> None:
        self._leases[lease] = stage
        self._tick()

    def _tick(self) -> None:
        """Say what this process's time goes to from now on; called wherever that changes."""
        now = part(
            self._leases.values(),
            started=self._engine.version >= 0,
            loading=self._loading,
            in_engine=self._engine.running,
            no_lease=self._why,
        )
        self._clock.enter(now.name, now.why)

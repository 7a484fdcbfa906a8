"""`slipstream status`: what each process of a run does now, and since when; of a run that ended, what it came to.

Invariant: it only looks. It says what it could not learn, and never waits longer than `ANSWER_SECONDS`.
"""

import asyncio
import fcntl
import time

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.config import Config, RunDir
from slipstream.launch.record import heldout_lines, identity
from slipstream.launch.supervisor import read_url
from slipstream.observe.clock import ClockReading
from slipstream.observe.summary import Summary
from slipstream.queue.client import QueueClient
from slipstream.queue.messages import RollouterBeat, Status

ANSWER_SECONDS = 3.0


def show_status(config: Config, run_dir: RunDir, console: Console) -> int:
    """Returns the exit code: 1 when the run goes on and its queue does not answer."""
    status = asyncio.run(ask_queue(run_dir))
    if status is not None:
        _show(console, config, status)
        return 0
    if supervised(run_dir):
        _say(
            console,
            f"the run goes on, but its queue does not answer ({ANSWER_SECONDS:.0f} s); "
            f"see {run_dir.logs / 'queue.log'}",
        )
        return 1
    if not run_dir.summary.is_file():
        _say(
            console,
            f"no process of the run is there, and no summary: it was killed, or never came up; to go on with it: "
            f"slipstream run {run_dir.config} --dir {run_dir.root}",
        )
        return 0
    _say(console, "the run ended")
    msgspec.json.decode(run_dir.summary.read_bytes(), type=Summary).show(console, run_dir.summary)
    return 0


def supervised(run_dir: RunDir) -> bool:
    """Whether a `slipstream run` works in the directory: it holds the lock."""
    try:
        lock = (run_dir.root / "lock").open()
    except FileNotFoundError:
        return False
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def ask_queue(run_dir: RunDir) -> Status | None:
    """None when there is no queue, or it does not answer in time."""
    url = read_url(run_dir.root / "queue.url")
    if not url:
        return None
    try:
        async with asyncio.timeout(ANSWER_SECONDS), QueueClient(url, role="observer", name="status") as client:
            return await client.status()
    except TimeoutError:
        return None


def _show(console: Console, config: Config, status: Status) -> None:
    _say(console, f"the run goes on: version {status.version} of {config.run.steps}")
    table = Table.grid(padding=(0, 2))
    for row in process_rows(status):
        table.add_row(*map(Text, row))
    console.print(table)
    held = heldout_lines(status)
    _say(console, f"held out: {', '.join(held) or 'not evaluated yet'}")
    _say(console, f"accounts: {identity(status.tokens)}")


Row = tuple[str, str, str, str]  # who, what it does, for how long, why and with what


def process_rows(status: Status) -> list[Row]:
    rollouters = [_rollouter_row(beat) for beat in status.rollouters]
    none: list[Row] = [("rollouters", "none was heard of lately", "", "")]
    return [_queue_row(status), _learner_row(status.learner), *(rollouters or none)]


def _queue_row(status: Status) -> Row:
    does = "grants nothing" if status.why else "grants leases"
    counts = f"{status.leases.running} leases running, {status.groups_ready} groups ready"
    return "queue", does, "", "; ".join(part for part in (status.why, counts) if part)


def _learner_row(clock: ClockReading | None) -> Row:
    return ("learner", clock.now, _ago(clock), clock.why) if clock else ("learner", "was not heard of lately", "", "")


def _rollouter_row(beat: RollouterBeat) -> Row:
    with_what = f"{beat.running} trajectories, version {beat.version}"
    return beat.name, beat.clock.now, _ago(beat.clock), "; ".join(part for part in (beat.clock.why, with_what) if part)


def _ago(clock: ClockReading) -> str:
    return f"for {max(0.0, time.time() - clock.since):.0f} s"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)

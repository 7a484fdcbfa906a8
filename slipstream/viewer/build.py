"""From a run to the folder of its pages.

Invariant: trajectories are read, shown and let go one by one: memory does not grow with the run, apart from the list.
"""

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.config import Config, RunDir
from slipstream.errors import UserError
from slipstream.observe.steps import Learnt, read_step
from slipstream.queue.journal import read_trajectory
from slipstream.queue.wire import Malformed
from slipstream.viewer.folder import Folder, Manifest
from slipstream.viewer.pieces import Pieces
from slipstream.viewer.rows import SCALE, SEARCHED, shown
from slipstream.viewer.story import Story, read_stories

log = logging.getLogger(__name__)

STEPS_HELD = 32  # whose numbers are in memory at once: neighbours in the journal were trained on about the same time
SAY_EVERY = 0.2  # seconds

Progress = Callable[[int, int], None]  # trajectories done, of how many


class Wanted(msgspec.Struct, kw_only=True, frozen=True):
    out: Path  # folder to make
    model: str  # folder of the tokenizer
    steps: Path  # what each step made of each token
    replayed: str = ""  # how that was computed again
    start: int | None = None  # lease to open at


def build(config: Config, run_dir: RunDir, wanted: Wanted, progress: Progress) -> Path:
    """The index.html that it made. Raises UserError."""
    out, start = wanted.out, wanted.start
    stories = read_stories(run_dir.journal)
    if start is not None and start not in (leases := [story.lease for story in stories]):
        there = f"its {len(leases)} go from {min(leases)} to {max(leases)}" if leases else "it has none"
        raise UserError(f"--trajectory {start}: the run has no trajectory of this number; {there}")
    folder = None
    try:
        folder = Folder(out, Pieces(wanted.model))
        return _filled(folder, config, run_dir, stories, wanted, progress)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}; write --out FOLDER") from error
    finally:
        if folder is not None:
            folder.discard()


def _filled(
    folder: Folder, config: Config, run_dir: RunDir, stories: list[Story], wanted: Wanted, progress: Progress
) -> Path:
    of_step = functools.lru_cache(STEPS_HELD)(functools.partial(read_step, wanted.steps))
    manifest = Manifest(
        run=run_dir.root.name,
        trajectories=0,
        sampled=0,
        files=0,
        lines=0,
        recorded=0,
        replayed=wanted.replayed,
        steps=max((story.step or 0 for story in stories), default=0),
        cutoff=config.staleness.cutoff,
        unreadable=0,
        searched=SEARCHED,
        scale=SCALE,
        start=wanted.start,
    )
    said = 0.0
    for number, story in enumerate(stories):
        try:
            row = read_trajectory(run_dir.journal, story.place)
        except FileNotFoundError as error:
            raise UserError(f"RUN = {str(run_dir.root)!r}: its journal was compacted just now; ask again") from error
        except Malformed as error:
            log.warning("lease %d cannot be read: %s", story.lease, error)
            manifest.unreadable += 1
            continue
        learnt: Learnt | None = None if story.step is None else of_step(story.step).get(story.lease)
        line, tokens, text = shown(row, story, learnt, folder.pieces)
        folder.add(line, tokens, text)
        manifest.trajectories += 1
        manifest.sampled += line.sampled
        manifest.recorded += learnt is not None
        if time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            progress(number, len(stories))
    progress(len(stories), len(stories))
    return folder.finish(manifest)

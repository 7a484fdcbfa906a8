"""The commands that make pages of charts: `report` and `watch`.

Invariant: as with all commands, what they need is imported when they run.
"""

import argparse
import sys
from pathlib import Path

from slipstream.claim import existing
from slipstream.configfile import read_config
from slipstream.errors import UserError
from slipstream.trying import AddCommand


def add_commands(add: AddCommand) -> None:
    """`add`: name, command, what it says of itself, an example."""
    report = add("report", _report, "one page of charts of what a run did, RUN/report.html", "slipstream report runs/a")
    live = add("watch", _watch, "the same page while the run goes on, in a browser", "slipstream watch runs/a")
    live.add_argument("--port", type=int, default=0, metavar="N", help="on 127.0.0.1; default a free one")
    for sub in (report, live):
        sub.add_argument("run", type=Path, metavar="RUN", help="run directory")


def _report(arguments: argparse.Namespace) -> int:
    run_dir = existing(arguments.run)
    from slipstream.report.build import write_report

    write_report(read_config(run_dir.config, files=False), run_dir)
    sys.stdout.write(f"{run_dir.report.resolve().as_uri()}\n")
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.port <= 65535:
        raise UserError(f"--port {arguments.port}: is no port; write 0 to 65535")
    run_dir = existing(arguments.run)
    from slipstream.report.live import watch

    watch(read_config(run_dir.config, files=False), run_dir, arguments.port)
    return 0

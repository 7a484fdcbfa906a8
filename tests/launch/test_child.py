"""A child of the supervisor, and everything it started, are gone when it has ended."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

Modules = Callable[[str, str], str]

# Starts a grandchild in a process group of its own, which ignores SIGTERM, and a daemon, whose parent is gone at once;
# says their pids, and ends or waits as told.
PARENT = """
import os, pathlib, signal, subprocess, sys, time
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
grandchild = subprocess.Popen([sys.executable, "-c", ignore], process_group=0, stdout=subprocess.PIPE)
begin = "import subprocess; print(subprocess.Popen(['sleep', '600'], process_group=0, stdout=subprocess.DEVNULL).pid)"
daemon = subprocess.run([sys.executable, "-c", begin], stdout=subprocess.PIPE, text=True).stdout.strip()
grandchild.stdout.readline()
told = pathlib.Path(sys.argv[1])
told.with_suffix(".new").write_text(f"{os.getpid()} {grandchild.pid} {daemon}")
told.with_suffix(".new").rename(told)
"""

# What watches it: as the supervisor, it adopts orphans.
WATCH = """
import sys, time
from pathlib import Path
from slipstream.launch.child import Child
from slipstream.parent import adopt_orphans
adopt_orphans()
child = Child("a", [sys.argv[1], sys.argv[2]], Path(sys.argv[2] + ".log"))
child.start()
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
how = sys.argv[3]
if how == "kill":
    child.kill()
elif how == "ask":
    child.ask()
while child.ended() is None:
    time.sleep(0.01)
print(child.ended(), flush=True)
sys.stdin.readline()  # this process lives on: whatever is gone now did not die with it
"""


def after(modules: Modules, tmp_path: Path, code: str, how: str) -> str:
    """Run a child of that code and end it so; the exit code it was seen to have. Nothing of it is left."""
    told = tmp_path / "pids"
    watch = subprocess.Popen(
        [sys.executable, "-c", WATCH, modules("parent", PARENT + code), str(told), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert watch.stdout
        said = watch.stdout.readline().strip()
        pids = [int(word) for word in told.read_text().split()]
        assert len(pids) == 3
        assert not [pid for pid in pids if psutil.pid_exists(pid)]  # zombies exist
        return said
    finally:
        watch.kill()
        watch.communicate()


def test_a_child_that_ends_by_itself_leaves_nothing(modules: Modules, tmp_path: Path) -> None:
    assert after(modules, tmp_path, "sys.exit(3)", "wait") == "3"


def test_a_child_that_was_killed_leaves_nothing(modules: Modules, tmp_path: Path) -> None:
    assert after(modules, tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "wait") == "-9"


def test_a_child_that_was_asked_leaves_nothing(modules: Modules, tmp_path: Path) -> None:
    assert after(modules, tmp_path, "time.sleep(600)", "ask") == "-15"


def test_a_child_that_does_not_listen_is_killed(modules: Modules, tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    assert after(modules, tmp_path, code, "kill") == "-9"


def test_a_grandchild_that_died_with_its_parent_leaves_no_zombie(modules: Modules, tmp_path: Path) -> None:
    """As a vLLM engine does: the kernel kills it before anybody looks."""
    assert after(modules, tmp_path, "grandchild.kill(); os.kill(os.getpid(), signal.SIGKILL)", "wait") == "-9"

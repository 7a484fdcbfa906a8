"""SIGKILL and SIGSTOP of each process, at random moments of a run whose processes are all real.

The engine alone is a cheap one. After each run: it finished, the accounts hold, no trajectory was trained on twice, and
a replay makes every version as it was published.
"""

import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from ordeal import KINDS, ROLES, faults_of, inflict, outcome
from small_run import save_small_model, start, write_config

from slipstream.config import RunDir
from slipstream.configfile import read_config
from slipstream.learner.publisher import weights_directory

STEPS, PATIENCE = 30, 120.0


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("role", ROLES)
def test_killed_and_stopped_at_random_moments(role: str, small_model: Path, tmp_path: Path) -> None:
    chance = random.Random(f"{role} {os.environ.get('FAULTS_SEED', '0')}")
    faults = faults_of([(role, kind) for kind in KINDS for _ in range(2)], STEPS, chance)
    run, output = tmp_path / "run", tmp_path / "output"
    config = write_config(tmp_path, small_model, steps=STEPS, seed=1)
    running = start(config, run, output)
    try:
        inflicted = inflict(faults, psutil.Process(running.pid), RunDir(run), PATIENCE)
        running.wait(PATIENCE)
    except (TimeoutError, subprocess.TimeoutExpired) as late:
        pytest.fail(f"{late}; {faults}\n{output.read_text()[-3000:]}")
    finally:
        running.kill()
        running.wait()
        shutil.rmtree(weights_directory(read_config(config), RunDir(run), 1), ignore_errors=True)
    assert running.returncode == 0, output.read_text()[-3000:]
    found = outcome(run, STEPS, inflicted)
    assert found.wrong == [], f"{faults}: {found.wrong}"
    assert inflicted == Counter({f"{role} kill": 2, f"{role} stop": 2})
    assert found.trajectories >= STEPS * 3 * 4

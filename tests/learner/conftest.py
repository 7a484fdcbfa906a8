"""One tiny model on disk for all of the learner's tests."""

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from learner_world import save_tiny_model, save_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    save_tokenizer(folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Fork from a server that has imported torch once."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["learner_processes"])
    return context

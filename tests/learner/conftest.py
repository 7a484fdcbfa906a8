"""One tiny model on disk for all of the learner's tests."""

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

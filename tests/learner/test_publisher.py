"""Published versions: whole, checked, few, and gone from shared memory when nobody needs them."""

import fcntl
import os
import time
from pathlib import Path

import pytest
import torch
from learner_world import config

from slipstream.config import RunDir, WeightsSection
from slipstream.learner import publisher
from slipstream.learner.policy import Policy
from slipstream.learner.publisher import KEPT, LOCK, Publisher, weights_directory
from slipstream.weights_file import checksum, differences, model_tensors, read_tensors


@pytest.fixture
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(publisher, "SHARED_MEMORY", folder)
    return folder


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"b": torch.full((2, 3), value), "a": torch.full((4,), value, dtype=torch.float64)}


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_what_is_read_is_what_was_published(tiny_model: Path, tmp_path: Path) -> None:
    policy = Policy(tiny_model, chunk_tokens=8)
    weights = Publisher(tmp_path).publish(5, policy.tensors())
    assert weights.version == 5
    found = read_tensors(weights)
    assert checksum(found) == weights.checksum
    assert differences(weights.tensors, model_tensors(str(tiny_model))) == ""
    assert "lm_head.weight" not in found  # tied: it is the embedding
    with torch.no_grad():
        policy.parameters()[0].view(-1)[0] += 1
    assert Publisher(tmp_path).publish(6, policy.tensors()).checksum != weights.checksum


def test_float32_whatever_the_learner_computes_in(tmp_path: Path) -> None:
    weights = Publisher(tmp_path).publish(0, tensors(0.5))
    assert [(info.name, info.dtype, info.shape) for info in weights.tensors] == [
        ("b", "float32", [2, 3]),
        ("a", "float32", [4]),
    ]
    assert all(tensor.dtype == torch.float32 for tensor in read_tensors(weights).values())


def test_the_newest_few_stay(tmp_path: Path) -> None:
    here = Publisher(tmp_path)
    published = [here.publish(version, tensors(version)) for version in range(6)]
    assert versions(tmp_path) == [f"v0000000{version}.safetensors" for version in (3, 4, 5)]
    assert len(versions(tmp_path)) == KEPT
    assert checksum(read_tensors(published[-1])) == published[-1].checksum


def test_a_learner_that_went_back_is_not_swept_away_by_its_own_future(tmp_path: Path) -> None:
    """Killed at 18, resumed at 10: version 10 is the newest now, although others have higher numbers."""
    before = Publisher(tmp_path)
    for version in (16, 17, 18):
        before.publish(version, tensors(version))
    (tmp_path / "v00000019.draft").write_bytes(b"torn")
    again = Publisher(tmp_path)
    for version in (10, 11, 12):
        weights = again.publish(version, tensors(version))
        assert checksum(read_tensors(weights)) == weights.checksum
    assert versions(tmp_path) == [f"v000000{version}.safetensors" for version in (10, 11, 12)]
    assert not list(tmp_path.glob("*.draft"))


def test_where_versions_go(tmp_path: Path, shared_memory: Path) -> None:
    one, other = RunDir(tmp_path / "one"), RunDir(tmp_path / "other")
    plain = config("model")
    assert weights_directory(plain, one, 1_000).parent == shared_memory
    assert weights_directory(plain, one, 1_000) != weights_directory(plain, other, 1_000)
    assert weights_directory(plain, one, 1 << 60) == one.weights
    shared = config("model", weights=WeightsSection(directory=str(tmp_path / "share")))
    assert weights_directory(shared, one, 1_000).parent == tmp_path / "share"
    assert weights_directory(shared, one, 1_000) != weights_directory(shared, other, 1_000)


def test_shared_memory_is_given_back(shared_memory: Path) -> None:
    here = Publisher(shared_memory / "slipstream-mine")
    here.publish(0, tensors(0))
    here.close()
    assert not list(shared_memory.iterdir())


def test_folders_elsewhere_stay(tmp_path: Path) -> None:
    here = Publisher(tmp_path / "share")
    here.publish(0, tensors(0))
    here.close()
    assert len(versions(tmp_path / "share")) == 1


def test_what_killed_runs_left_is_swept_and_nothing_else(shared_memory: Path) -> None:
    long_ago = time.time() - 2 * publisher.ABANDONED_SECONDS

    def left(name: str, *, lock: bool, old: bool) -> Path:
        folder = shared_memory / name
        folder.mkdir()
        (folder / "v00000001.safetensors").write_bytes(b"weights")
        if lock:
            (folder / LOCK).touch()
        for path in (*folder.iterdir(), folder) if old else ():
            os.utime(path, (long_ago, long_ago))
        return folder

    dead = left("slipstream-dead", lock=True, old=True)
    restarting = left("slipstream-restarting", lock=True, old=False)
    somebodys = left("slipstream-notes", lock=False, old=True)
    alive = left("slipstream-alive", lock=True, old=True)
    with (alive / LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        Publisher(shared_memory / "slipstream-mine").close()
    assert not dead.exists()
    assert all(folder.exists() for folder in (restarting, somebodys, alive))

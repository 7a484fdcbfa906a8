"""Setting up `.venv`: which Python, which torch, what is done anew and what is not; and the container files."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The set-up script, at work in a folder of its own."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "setup_script", module)
    spec.loader.exec_module(module)
    for name, value in {
        "ROOT": tmp_path,
        "VENV": tmp_path / ".venv",
        "CACHE": tmp_path / ".cache",
        "STAMP": tmp_path / ".venv" / "setup-stamp",
        "UNFINISHED": tmp_path / ".venv" / "setup-unfinished",
    }.items():
        monkeypatch.setattr(module, name, value)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    return module


class Ran(list[str]):
    """The commands that the set-up would run, one of which may fail. Only `venv` is really made, without pip."""

    def __init__(self, *, fails: str = "nothing") -> None:
        super().__init__()
        self._fails = fails

    def run(self, what: str, command: list[str]) -> None:
        line = " ".join(command)
        self.append(line)
        if " venv " in line:
            subprocess.run([*command[:3], "--without-pip", *command[3:]], check=True)
        if re.search(self._fails, line):
            raise sys.modules["setup_script"].Failed(f"{what}: exit code 1")

    def of(self, *kinds: str) -> list[str]:
        """Which kinds of command were run, in order."""
        return [kind for line in self for kind in kinds if kind in line]


@pytest.fixture
def main(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[Ran], int]:
    def with_steps(ran: Ran) -> int:
        monkeypatch.setattr(setup, "Steps", lambda keep_open: ran)
        return setup.main()

    monkeypatch.setattr(setup, "pip_places", lambda python: ("", ["/wheels"]))
    monkeypatch.setattr(setup, "installed", lambda python, package: "2.13.0+cpu")
    return with_steps


KINDS = (" -m venv", "install --quiet --timeout 15 --retries 1 uv==", "torch==", "--override", "[cuda,dev]")


def test_a_fresh_folder_then_nothing_to_do(setup: ModuleType, main: Callable[[Ran], int]) -> None:
    first = Ran()
    assert main(first) == 0
    assert first.of(*KINDS) == list(KINDS[:4])
    assert "--find-links /wheels" in first[-1]
    assert first[-1].endswith("[cpu,dev]")
    left_out = (setup.CACHE / "setup-overrides.txt").read_text()
    assert left_out.split("\n")[0] == "torchvision; sys_platform == 'never'"
    again = Ran()
    assert main(again) == 0
    assert again == []


def test_a_changed_project_installs_anew_into_the_same_environment(
    setup: ModuleType, main: Callable[[Ran], int]
) -> None:
    assert main(Ran()) == 0
    (setup.ROOT / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    again = Ran()
    assert main(again) == 0
    assert again.of(*KINDS) == list(KINDS[1:4])


@pytest.mark.parametrize("at", ["uv==", "torch==", "--override"])
def test_a_set_up_that_was_cut_short_is_begun_anew(
    at: str, setup: ModuleType, main: Callable[[Ran], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(Ran(fails=at)) == 1
    assert not setup.STAMP.exists()
    assert "exit code 1" in capsys.readouterr().err
    (setup.VENV / "half").touch()
    again = Ran()
    assert main(again) == 0
    assert again.of(*KINDS) == list(KINDS[:4])
    assert not (setup.VENV / "half").exists()


def test_an_environment_whose_python_is_gone_is_made_anew(setup: ModuleType, main: Callable[[Ran], int]) -> None:
    assert main(Ran()) == 0
    python = setup.VENV / "bin" / "python"
    python.unlink()
    python.symlink_to("/away/python3.11")
    again = Ran()
    assert main(again) == 0
    assert again.of(*KINDS) == list(KINDS[:4])


def test_torch_comes_from_pips_places_then_from_its_own_index(
    setup: ModuleType, main: Callable[[Ran], int], capsys: pytest.CaptureFixture[str]
) -> None:
    second = Ran(fails=r"--no-deps torch==")
    assert main(second) == 0
    assert [line for line in second if "torch==" in line][1].endswith(f"--index-url {setup.TORCH_INDEX} {setup.TORCH}")
    setup.STAMP.unlink()
    capsys.readouterr()
    assert main(Ran(fails="torch==")) == 1
    said = capsys.readouterr().err
    assert "was found neither where pip is configured to look nor at" in said
    assert "PIP_FIND_LINKS=FOLDER" in said


def test_another_torch_than_the_engines_is_an_error(
    setup: ModuleType, main: Callable[[Ran], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "installed", lambda python, package: "2.14.0")
    assert main(Ran()) == 1
    assert "torch 2.14.0 is installed where torch==2.13.0+cpu is needed" in capsys.readouterr().err
    assert not setup.STAMP.exists()


def test_a_missing_libnuma_is_said_before_anything_is_installed(
    setup: ModuleType, main: Callable[[Ran], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup, "NUMA", "libnowhere.so.1")
    ran = Ran()
    assert main(ran) == 1
    assert ran == []
    assert "apt install libnuma1" in capsys.readouterr().err


def test_a_gpu_gets_the_cuda_engine(
    setup: ModuleType, main: Callable[[Ran], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "has_gpu", lambda: True)
    ran = Ran()
    assert main(ran) == 0
    assert ran.of(*KINDS) == [KINDS[0], KINDS[1], KINDS[4]]
    monkeypatch.setattr(setup, "has_gpu", lambda: False)
    assert main(Ran()) == 0
    assert main(ran := Ran()) == 0
    assert ran == []


def fake(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def python_of(version: str, *, venv: bool = True) -> str:
    return f'case "$2" in *version_info*) echo {version};; *ensurepip*) exit {0 if venv else 1};; esac'


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3": "3 11"}, "python3"),
        ({"python3": "3 13", "python3.11": "3 11"}, "python3.11"),
        ({"python3": "3 9", "python3.12": "3 12"}, "python3.12"),
        ({"python3": "3 12"}, "python3"),
    ],
)
def test_the_python_that_is_chosen(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pythons: dict[str, str], chosen: str
) -> None:
    for name, version in pythons.items():
        fake(tmp_path, name, python_of(version))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.choose_python() == str(tmp_path / chosen)


def test_no_usable_python_says_what_was_seen(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(setup.Failed, match=r"one from 3.11 to 3.14 with its venv module\): none was found"):
        setup.choose_python()
    fake(tmp_path, "python3", python_of("3 9"))
    fake(tmp_path, "python3.11", python_of("3 11", venv=False))
    fake(tmp_path, "python3.12", "exit 127")
    with pytest.raises(setup.Failed) as failed:
        setup.choose_python()
    assert "python3.11 has no venv module (on Debian or Ubuntu: apt install python3.11-venv)" in str(failed.value)
    assert "python3 is 3.9" in str(failed.value)
    assert "3.12" not in str(failed.value)


@pytest.mark.parametrize(
    ("body", "found"),
    [("echo GPU 0: H200", True), ("echo no devices; exit 9", False), ("exit 0", False), (None, False)],
)
def test_a_gpu_is_there_when_nvidia_smi_lists_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str | None, found: bool
) -> None:
    spec = importlib.util.spec_from_file_location("fresh_setup_script", ROOT / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if body is not None:
        fake(tmp_path, "nvidia-smi", body)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert module.has_gpu() is found


def test_uv_is_told_what_pip_is_told(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = https://mirror.example/simple\nfind-links = /a\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/b /c")
    index, find_links = setup.pip_places(sys.executable)
    assert (index, find_links) == ("https://mirror.example/simple", ["/b", "/c"])


def test_a_failing_step_shows_the_end_of_its_output(setup: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    with setup.lock() as held:
        steps = setup.Steps(held.fileno())
        steps.run("well", ["sh", "-c", "echo fine"])
        with pytest.raises(setup.Failed, match="ill: exit code 3") as failed:
            steps.run("ill", ["sh", "-c", "for i in 1 2 3 4 5 6 7; do echo line $i; done; exit 3"])
    assert "line 7" in str(failed.value)
    assert "line 1" not in str(failed.value)
    assert "fine" not in str(failed.value)
    assert "setup: well\nsetup: ill\n" in capfd.readouterr().out


def test_a_second_set_up_waits_for_the_first(setup: ModuleType) -> None:
    """Also when the first was killed and only a child of its is left."""
    setup.CACHE.mkdir()
    script = f"""
import importlib.util, pathlib
spec = importlib.util.spec_from_file_location("s", {str(ROOT / "scripts" / "setup.py")!r})
s = importlib.util.module_from_spec(spec); spec.loader.exec_module(s)
s.CACHE = pathlib.Path({str(setup.CACHE)!r})
with s.lock() as held:
    s.Steps(held.fileno()).run("child", ["sh", "-c", "echo $$ > {setup.CACHE}/pid; exec sleep 60"])
"""
    first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid_file = setup.CACHE / "pid"
    until = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.02)
    child = int(pid_file.read_text())
    first.kill()
    first.wait()
    second = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert second.stdout is not None
        assert "waiting for another set-up" in second.stdout.readline()
        os.kill(child, 9)
        assert second.stdout.readline() == "setup: child\n"
    finally:
        until = time.monotonic() + 20
        while time.monotonic() < until and second.poll() is None:
            pid = pid_file.read_text().strip()
            if pid and int(pid) != child:
                os.kill(int(pid), 9)  # the second ends with it
                break
            time.sleep(0.02)
        second.kill()
        second.wait()


def test_setting_up_again_takes_under_two_seconds() -> None:
    if not (ROOT / ".venv" / "setup-stamp").exists():
        pytest.skip("this environment was not made by `make setup`")
    began = time.monotonic()
    said = subprocess.run(["make", "-s", "setup"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert (said.returncode, said.stdout) == (0, "")
    assert time.monotonic() - began < 2


# -- containers and CI ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_the_dockerfiles_are_lint_free(name: str) -> None:
    linter = Path(sys.executable).parent / "hadolint"
    if not linter.exists():
        pytest.skip("hadolint has no wheel for this machine")
    said = subprocess.run([linter, ROOT / "docker" / name], stdout=subprocess.PIPE, text=True)
    assert (said.returncode, said.stdout) == (0, "")


def test_the_compose_file_starts_commands_that_there_are_on_files_that_there_are() -> None:
    import yaml

    from slipstream.cli import parse

    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"queue", "learner", "rollouter"}
    for name, service in services.items():
        arguments = parse([str(word) for word in service["command"]])
        assert arguments.command.__name__ == f"_{name}"
        assert "ports" not in service, "nothing is reached from outside"
        assert (ROOT / "docker" / service["build"]["dockerfile"].removeprefix("docker/")).is_file()
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            made_by_the_demo = source == "../.cache/calculator-model"
            assert source in compose["volumes"] or made_by_the_demo or (ROOT / "docker" / source).exists(), source
    words = {name: [w for w in service["command"] if "=" in w] for name, service in services.items()}
    assert words["queue"] == words["learner"] == words["rollouter"], "all read the same config"
    address = services["queue"]["networks"]["inside"]["ipv4_address"]
    assert f"queue.listen=tcp://{address}:5571" in words["queue"]
    assert compose["networks"]["inside"]["internal"] is True


def test_ci_runs_the_readmes_test_command() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"
    assert "make test" in (ROOT / "README.md").read_text()

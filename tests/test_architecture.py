"""What may import what, and how light `import slipstream` stays."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
HEAVY = {"torch", "vllm", "transformers", "renderers", "pyarrow", "zmq", "wandb", "numpy", "rich"}
MOST_LINES = 400


def heavy_after(statement: str) -> tuple[set[str], float]:
    """The heavy modules that a fresh interpreter has after `statement`, and the seconds that it took."""
    script = f"import time; t = time.process_time(); {statement}; s = time.process_time() - t; import json, sys; "
    script += "print(json.dumps([sorted({m.partition('.')[0] for m in sys.modules}), s]))"
    said = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    modules, seconds = json.loads(said.stdout.splitlines()[-1])
    return HEAVY & set(modules), seconds


@pytest.mark.parametrize("module", ["slipstream", "slipstream.cli", "slipstream.staleness", "slipstream.queue"])
def test_the_top_level_imports_nothing_heavy(module: str) -> None:
    assert heavy_after(f"import {module}")[0] == set()


def test_importing_costs_under_300_ms() -> None:
    # CPU time, the best of some: what the import costs, not what else the machine does at the time.
    assert min(heavy_after("import slipstream")[1] for _ in range(5)) < 0.3


def test_only_the_engine_and_the_learner_need_torch_and_vllm() -> None:
    """All other modules can be imported where those two are not installed (`tensors` makes torch tensors)."""
    may = ("learner/", "rollouter/engine", "rollouter/process", "queue/tensors", "__main__")
    paths = [str(path.relative_to(ROOT / "slipstream")) for path in sorted((ROOT / "slipstream").rglob("*.py"))]
    modules = [path.removesuffix(".py").removesuffix("/__init__") for path in paths if not path.startswith(may)]
    script = "import sys, importlib; sys.modules.update(torch=None, vllm=None)\n"
    script += "".join(f"importlib.import_module('slipstream.{module}')\n".replace("/", ".") for module in modules[1:])
    said = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert said.returncode == 0, said.stderr


def test_the_rooms_import_only_what_they_may() -> None:
    said = subprocess.run([BIN / "lint-imports"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    assert said.returncode == 0, said.stdout


def test_a_forbidden_import_would_be_seen(tmp_path: Path) -> None:
    """The contracts are not empty: with one import too many in a copy, they break."""
    package = tmp_path / "slipstream"
    subprocess.run(["cp", "-r", ROOT / "slipstream", ROOT / "pyproject.toml", tmp_path], check=True)
    (package / "staleness" / "sneaky.py").write_text('"""No."""\n\nimport slipstream.queue\n')
    said = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert said.returncode == 1
    assert "slipstream.staleness.sneaky -> slipstream.queue" in said.stdout


def test_every_module_says_what_it_is_and_fits_on_a_few_screens() -> None:
    for path in (ROOT / "slipstream").rglob("*.py"):
        text = path.read_text()
        assert not text or text.startswith('"""'), f"{path} has no docstring"
        assert len(text.splitlines()) < MOST_LINES, f"{path} is long"

"""A supervisor as `slipstream run` has it, with other children: `python supervise.py RUN RESTARTS`."""

import sys
from pathlib import Path

from slipstream.config import Config, EnvironmentSection, ModelSection, ObserveSection, RunDir, RunSection, TasksSection
from slipstream.launch import supervisor
from slipstream.launch.child import Child


class WithFakes(supervisor.Supervisor):
    def _child(self, role: str, name: str = "") -> Child:
        name = name or role
        return Child(name, [f"fake_{role}", str(self._run_dir.root)], self._run_dir.logs / f"{name}.log")


if __name__ == "__main__":
    supervisor.Supervisor = WithFakes  # pyright: ignore[reportPrivateImportUsage]
    config = Config(
        model=ModelSection(path="m"),
        environment=EnvironmentSection(path="e.py:e"),
        tasks=TasksSection(train="t.jsonl"),
        run=RunSection(restarts=int(sys.argv[2])),
        observe=ObserveSection(wandb="off"),
    )
    sys.exit(supervisor.run(config, RunDir(Path(sys.argv[1]))))

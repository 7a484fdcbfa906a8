"""`slipstream run` with rollouters that have the cheap engine: `python supervise.py CONFIG RUN`."""

import os
import sys
from pathlib import Path

from slipstream.config import RunDir
from slipstream.configfile import read_config, write_config
from slipstream.launch import supervisor
from slipstream.launch.child import Child


class WithCheapEngines(supervisor.Supervisor):
    def _child(self, role: str, name: str = "") -> Child:
        if role != "rollouter":
            return super()._child(role, name)
        command = ["cheap_rollouter", role, str(self._run_dir.config), "--dir", str(self._run_dir.root)]
        return Child(name, [*command, "--name", name], self._run_dir.logs / f"{name}.log")


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    supervisor.Supervisor = WithCheapEngines  # pyright: ignore[reportPrivateImportUsage]
    run_dir = RunDir(Path(sys.argv[2]))
    run_dir.root.mkdir(exist_ok=True)
    config = read_config(Path(sys.argv[1]))
    write_config(config, run_dir.config)
    sys.exit(supervisor.run(config, run_dir))

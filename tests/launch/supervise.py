"""A supervisor as `slipstream run` has it, with other children: `python supervise.py RUN CONFIG_JSON`."""

import sys
from pathlib import Path

import msgspec

from slipstream.claim import claimed
from slipstream.config import Config, RunDir
from slipstream.configfile import read_config, write_config
from slipstream.launch import supervisor
from slipstream.launch.child import Child


class WithFakes(supervisor.Supervisor):
    def _child(self, role: str, name: str = "") -> Child:
        name = name or role
        return Child(name, [f"fake_{role}", str(self._run_dir.root)], self._run_dir.logs / f"{name}.log")


if __name__ == "__main__":
    supervisor.Supervisor = WithFakes  # pyright: ignore[reportPrivateImportUsage]
    run_dir = RunDir(Path(sys.argv[1]))
    run_dir.root.mkdir(exist_ok=True)
    write_config(msgspec.json.decode(sys.argv[2], type=Config), run_dir.config)
    with claimed(run_dir, config := read_config(run_dir.config, files=False)):
        sys.exit(supervisor.run(config, run_dir))

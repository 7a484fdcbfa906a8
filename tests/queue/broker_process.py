"""A queue process for tests: broker_process.py RUN CONFIG_JSON."""

import asyncio
import logging
import sys
from pathlib import Path

import msgspec
from queue_made import make_config, make_tasks

from slipstream.config import RunDir
from slipstream.queue.broker import serve

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    config = make_config(**msgspec.json.decode(sys.argv[2]))
    asyncio.run(serve(config, RunDir(Path(sys.argv[1])), make_tasks(), make_tasks(3, "h")))

"""What every process that computes sets up first: how idle threads wait, and its log."""

import logging
import os


def before_torch(level: int = logging.INFO) -> None:
    """Must run before torch is imported: it reads the environment once."""
    # Threads that wait for work sleep: spinning, they take the core from whoever shares it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

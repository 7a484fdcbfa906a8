"""How many bytes of trajectories the queue may hold: `queue.memory_mb`, or a quarter of what this machine has.

Invariant: a container's limit counts, where there is one.
"""

import os
from pathlib import Path

SHARE = 4  # of the memory, one part in so many
CONTAINER = Path("/sys/fs/cgroup/memory.max")


def budget(memory_mb: int) -> int:
    return memory_mb << 20 if memory_mb else there_is() // SHARE


def there_is() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return physical

"""A rollouter for tests, of which nothing but the queue's side is real: worker_process.py URL KEY NAME.

It joins as a new machine does, by address and key alone, makes trajectories until the run is over, and on SIGTERM
gives its leases back.
"""

import asyncio
import signal
import sys

from queue_made import make_beat, make_trajectory

from slipstream.queue.client import QueueClient
from slipstream.queue.joining import fetch_config

SECONDS = 0.05  # that a trajectory takes


async def work(url: str, name: str, room: int) -> None:
    left = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, left.set)
    async with QueueClient(url, role="rollouter", name=name) as client:
        while not left.is_set():
            granted = await client.ask(room, wait_s=0.5)
            if granted.done:
                return
            leases = [lease.lease for lease in granted.leases]
            await client.beat(make_beat(name, leases))
            for lease in granted.leases:
                await asyncio.sleep(SECONDS)
                if left.is_set():
                    await client.give_back(leases, "rollouter left")
                    return
                version = max(0, lease.min_version)
                await client.deliver(make_trajectory(lease, versions=[version] * 3, reward=float(lease.member % 2)))
                leases.remove(lease.lease)


if __name__ == "__main__":
    url, key, name = sys.argv[1:]
    config = fetch_config(f"{url}#{key}")
    asyncio.run(work(f"{url}#{key}", name, config.rollout.group))

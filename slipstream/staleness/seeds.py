"""Sampling seeds: no two samples of a run share one, and the run's seed decides them all."""

import hashlib


def sample_seed(run_seed: int, group: int, member: int, attempt: int) -> int:
    """63 bits that depend on every argument. Held-out groups have group numbers of their own."""
    name = f"{run_seed}/{group}/{member}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 1

"""Environments that others wrote, as tasks and rewards of ours. Each needs the optional extra of its name."""

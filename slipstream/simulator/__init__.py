"""The run on a virtual clock: the real gate and ledger, with engines, tools and learner as distributions of times."""

from slipstream.simulator.durations import Durations, empirical
from slipstream.simulator.measurements import Measured, measured
from slipstream.simulator.scenario import Scenario, read_scenario
from slipstream.simulator.tally import Result
from slipstream.simulator.world import simulate

__all__ = ["Durations", "Measured", "Result", "Scenario", "empirical", "measured", "read_scenario", "simulate"]

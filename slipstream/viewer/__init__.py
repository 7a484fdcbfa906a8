"""`slipstream view`: a folder of pages that show a run's trajectories, token by token, without a server.

Invariant: what is shown is what the journal and the learner recorded; a number that was not recorded is shown as such.
"""

"""`slipstream report` and `slipstream watch`: what a run did, as one page of charts; made at its end, or while it runs.

Invariant: a number that is shown was measured by the run itself; a chart without data says what would give it some.
"""

"""`python -m slipstream`, and so `torchrun -m slipstream learner ...`."""

import sys

from slipstream.cli import main

if __name__ == "__main__":
    sys.exit(main())

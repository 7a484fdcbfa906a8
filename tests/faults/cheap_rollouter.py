"""The real rollouter process with the cheap engine: `python -m cheap_rollouter rollouter CONFIG --dir RUN`."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # it needs none, and would import it for seconds

from cheap_engine import CheapEngine  # noqa: E402

from slipstream.cli import main  # noqa: E402
from slipstream.rollouter import process  # noqa: E402

process.Engine = CheapEngine  # type: ignore[misc, assignment]

if __name__ == "__main__":
    sys.exit(main())

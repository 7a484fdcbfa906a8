"""Tampered frames into the queue's decoder for some CPU-minutes (tests/queue/test_fuzz.py's, on and on).

The last line is one JSON object; with --json there is only that. A frame that does anything but be refused or be read
whole ends it with that frame and a traceback.

    python benchmarks/fuzz_queue.py [--minutes 10] [--json]
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent / "tests" / "queue")  # benchmarks/queue.py is no `queue`

from hypothesis import HealthCheck, given, seed, settings  # noqa: E402
from test_fuzz import frames, read  # noqa: E402

ROUND = 2000  # frames from one seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the last line only")
    parser.add_argument("--minutes", type=float, default=10.0, help="of CPU time")
    arguments = parser.parse_args()
    verdicts: Counter[str] = Counter()
    rounds = 0
    while time.process_time() < 60 * arguments.minutes:

        @seed(rounds)
        @given(frames())
        @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        def tampered(frame: bytes) -> None:
            verdicts[read(frame)] += 1

        tampered()
        rounds += 1
        if not arguments.json:
            print(f"{time.process_time():.0f} s of CPU: {dict(verdicts)}", flush=True)
    print(json.dumps({"cpu_s": round(time.process_time(), 1), **verdicts, "broken": 0}))


if __name__ == "__main__":
    main()

"""Many commands, with stretches in which half of them fail: memory, registers and speed stay flat.

    mpirun -n 4 python -m spmd_disco scripts/soak.py --commands 10000000

Prints one JSON line per tenth of the run: commands per second of each kind of stretch, the resident
memory of every worker and how many registers it has; then one that compares the last with the
second (the first still warms up), and ends with status 1 if memory or registers have grown or the
speed has not kept up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import spmd_disco as di
from spmd_disco.worker import current_worker

#: Commands between two sync points.
BATCH = 1000
#: In every tenth, one stretch of so many commands has every second one fail on all workers.
FAILING = 20_000
#: What may come on top of the second tenth's memory, in MiB: what malloc keeps for later.
MORE_MEMORY = 16
#: The share of the second tenth's speed that the last must reach. Machines are noisy.
KEEP_UP = 0.5


def odd(i: int) -> int:
    """Fail for even numbers."""
    if i % 2 == 0:
        raise ValueError(f"{i} is even")
    return i


def state() -> tuple[float, int]:
    """On a worker: return the resident memory in MiB, and the number of registers."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[1])
    worker = current_worker()
    assert worker is not None
    return pages * 4096 / 2**20, len(worker.registers)


def stretch(sess: di.Session, function: di.DRef, commands: int) -> tuple[float, int]:
    """Call `function` so often; return commands per second and how many failures were heard of."""
    failures = 0
    start = time.perf_counter()
    for begin in range(0, commands, BATCH):
        for i in range(begin, min(begin + BATCH, commands)):
            sess.call(function, i)
        try:
            sess.sync()
        except di.WorkerError as e:
            failures += len(e.failures) + e.dropped
    return commands / (time.perf_counter() - start), failures


def main() -> int:
    """Run it."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--commands", type=int, default=10_000_000)
    options = p.parse_args()
    rows = []
    with di.session() as sess:
        good, bad = sess.call(lambda: abs), sess.call(lambda: odd)
        sess.sync()
        failing = min(FAILING, max(2, options.commands // 20))
        for tenth in range(10):
            speed, none = stretch(sess, good, options.commands // 10 - failing)
            failing_speed, failures = stretch(sess, bad, failing)
            memory, registers = zip(*sess.call(state).get_all(), strict=True)
            rows.append(
                {
                    "tenth": tenth + 1,
                    "n": sess.num_workers,
                    "commands_per_s": round(speed),
                    "failing_commands_per_s": round(failing_speed),
                    "failures": failures + none,
                    "rss_MiB": [round(m, 1) for m in memory],
                    "registers": list(registers),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            if failures != failing // 2 * sess.num_workers or none:
                print(f"soak.py: {failures} failures were reported", file=sys.stderr)
                return 1
    early, late = rows[1], rows[-1]
    grown = max(b - a for a, b in zip(early["rss_MiB"], late["rss_MiB"], strict=True))
    kept = min(late[k] / early[k] for k in ("commands_per_s", "failing_commands_per_s"))
    leaked = late["registers"] != early["registers"]
    print(json.dumps({"rss_grown_MiB": round(grown, 1), "speed_kept": round(kept, 2)}))
    return int(grown > MORE_MEMORY or kept < KEEP_UP or leaked)


if __name__ == "__main__":
    sys.exit(main())

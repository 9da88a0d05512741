"""Heat spreads over a plate: explicit finite differences, with the rows split over the workers.

    mpirun -n 4 python -m spmd_disco docs/examples/heat.py --out heat.png

Each worker holds a block of rows, and one more row above and below it: its neighbours' outermost
rows, or the edge of the plate. Before every step the workers exchange these rows among themselves,
by MPI calls of their own. The controller only says how far to go on, and collects the result.

The progress bar wants a terminal. Under mpirun TTY_COMPATIBLE=1 says that there is one behind it.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI
from rich.console import Console
from rich.progress import Progress

import spmd_disco as di

RATE = 0.2  # diffusivity × time step / spacing²; beyond 0.25 the method is unstable
STEPS_PER_COMMAND = 20

# ---- Functions that run on every worker. The controller sends them there.


def exchange_rows(part: np.ndarray) -> None:
    """Swap the outermost rows of the block with the neighbours, if there are any."""
    me = di.get_worker()
    above = me.worker_id - 1 if me.worker_id > 0 else MPI.PROC_NULL
    below = me.worker_id + 1 if me.worker_id < me.num_workers - 1 else MPI.PROC_NULL
    me.comm.Sendrecv(part[1], dest=above, recvbuf=part[-1], source=below)
    me.comm.Sendrecv(part[-2], dest=below, recvbuf=part[0], source=above)


def step(part: np.ndarray) -> None:
    """Let the heat flow for one time step, everywhere but on the edges of `part`."""
    inner = part[1:-1, 1:-1]
    neighbours = part[:-2, 1:-1] + part[2:, 1:-1] + part[1:-1, :-2] + part[1:-1, 2:]
    inner += RATE * (neighbours - 4 * inner)


def advance(part: np.ndarray, steps: int) -> None:
    for _ in range(steps):
        exchange_rows(part)
        step(part)


# ---- The controller's program.


def plate(size: int) -> np.ndarray:
    """Return the temperatures at the start: one edge and a disc are hot, another disc is cold."""
    y, x = np.mgrid[0 : 1 : size * 1j, 0 : 1 : size * 1j]
    field = np.zeros((size, size))
    field[np.hypot(x - 0.35, y - 0.4) < 0.15] = 1
    field[np.hypot(x - 0.7, y - 0.65) < 0.2] = -1
    field[-1] = np.sin(np.pi * x[-1])
    return field


def solve(sess: di.Session, field: np.ndarray, steps: int, bar: Progress) -> np.ndarray:
    """Return the field after `steps` steps."""
    starts = [(len(field) - 2) * i // sess.num_workers for i in range(sess.num_workers + 1)]
    part = sess.put([field[a : b + 2] for a, b in itertools.pairwise(starts)])
    for done in bar.track(range(0, steps, STEPS_PER_COMMAND)):
        sess.call(advance, part, min(STEPS_PER_COMMAND, steps - done))
    parts = part.get_all()
    return np.vstack([parts[0][:1], *(rows[1:-1] for rows in parts), parts[-1][-1:]])


def draw(field: np.ndarray, steps: int, path: Path) -> None:
    from matplotlib.figure import Figure  # without pyplot, which would look for a screen

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.add_subplot(title=f"after {steps} steps", xlabel="x", ylabel="y")
    image = axes.imshow(field, "coolwarm", vmin=-1, vmax=1, origin="lower", extent=(0, 1, 0, 1))
    figure.colorbar(image, label="temperature")
    figure.savefig(path, dpi=100)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="heat.py",
        description=__doc__.split("\n", 1)[0],
        epilog="Start it with: mpirun -n 4 python -m spmd_disco heat.py",
    )
    parser.add_argument("--size", type=int, default=256, help="points along a side (256)")
    parser.add_argument("--steps", type=int, default=2000, help="time steps (2000)")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw the field at the end")
    parser.add_argument("--check", action="store_true", help="compare with one worker's result")
    return parser.parse_args()


def main() -> None:
    args, start = parse_arguments(), time.perf_counter()
    console = Console(file=sys.stderr)
    with di.session() as sess, Progress(console=console, disable=not console.is_terminal) as bar:
        if isinstance(sess, di.ProcessSession):
            sys.exit("heat.py: its workers exchange rows by MPI: start it with mpirun, see --help")
        least = sess.num_workers + 2
        if args.size < least:
            sys.exit(f"heat.py: {sess.num_workers} workers need --size {least} or more")
        field = plate(args.size)
        result = solve(sess, field, args.steps, bar)
    print(f"{args.steps} steps in {time.perf_counter() - start:.2f} s, mean {result.mean():.6f}")
    if args.out:
        draw(result, args.steps, args.out)
    if args.check:
        for _ in range(args.steps):
            step(field)
        if not np.array_equal(result, field):
            sys.exit("heat.py: the result is not that of one worker")
        print("the same bits as one worker gets")


if __name__ == "__main__":
    main()

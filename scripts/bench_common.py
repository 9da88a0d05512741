"""What the benchmark scripts share: rounds, JSON lines, plots."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import spmd_disco as di


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--rounds", type=int, default=9, help="interleaved rounds, at least 9 (default)")
    p.add_argument("--peer", default="mpi", choices=["mpi"], help="what runs beside")
    p.add_argument("--plot", metavar="FILE.png", help="also draw the results")
    return p


def summary(values: list[float]) -> dict[str, float]:
    """Return median, min and max."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def interleaved(
    rounds: int, ours: Callable[[], float], peer: Callable[[], float] | None
) -> dict[str, Any]:
    """Time both in turn, `rounds` times, after one round that does not count.

    Returns
    -------
    dict
        Summaries of ours, the peer, and the ratio peer / ours of each round: above 1, we are
        faster.
    """
    a: list[float] = []
    b: list[float] = []
    for i in range(rounds + 1):
        mine = ours()
        theirs = peer() if peer is not None else None
        if i:
            a.append(mine)
            if theirs is not None:
                b.append(theirs)
    row: dict[str, Any] = {"ours": summary(a)}
    if b:
        row["peer"] = summary(b)
        row["ratio"] = summary([theirs / mine for mine, theirs in zip(a, b, strict=True)])
    return row


def emit(row: dict[str, Any]) -> dict[str, Any]:
    """Print a result as one line of JSON."""
    print(json.dumps(row), flush=True)
    return row


def emit_header(sess: di.Session, **more: Any) -> None:
    """Print where and with what this runs."""
    emit(
        {
            "bench": "environment",
            "n": sess.num_workers,
            "spmd_disco": di.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "mpi": " ".join(map(str, [MPI.get_vendor()[0], *MPI.get_vendor()[1]])),
            "machine": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            **more,
        }
    )


def check_rounds(rounds: int) -> None:
    """Refuse fewer rounds than a result may rest on."""
    if rounds < 9:
        sys.exit(f"--rounds {rounds}: medians of fewer than 9 rounds say little")


def plot(
    rows: list[dict[str, Any]], path: str, x: str, panels: str, xlabel: str, ylabel: str
) -> None:
    """Draw ours and the peer's medians over `x`, log-log, one panel for each value of `panels`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row[panels] for row in rows))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=False):
        mine = [row for row in rows if row[panels] == name]
        for key, label, style in (("ours", "spmd_disco", "o-"), ("peer", "mpi4py", "s--")):
            points = [(row[x], row[key]) for row in mine if key in row]
            if not points:
                continue
            xs = [p[0] for p in points]
            mid = [p[1]["median"] for p in points]
            axis.plot(xs, mid, style, label=label, markersize=4)
            axis.fill_between(
                xs, [p[1]["min"] for p in points], [p[1]["max"] for p in points], alpha=0.2
            )
        axis.set(xscale="log", yscale="log", title=name, xlabel=xlabel, ylabel=ylabel)
        axis.grid(which="both", alpha=0.3)
        axis.legend()
    for axis in axes.flat[len(names) :]:
        axis.remove()
    figure.savefig(path, dpi=120)

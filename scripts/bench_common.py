"""What the benchmark scripts share: options, interleaved rounds, JSON lines, plots."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

import spmd_disco as di
from spmd_disco import native

#: One curve of a plot: where, and the summary of what was measured there.
Curve = Sequence[tuple[float, Mapping[str, float]]]
#: Names of what runs beside us, as tables and plots show them.
PEERS = {"mpi": "mpi4py", "tvm": "TVM ProcessSession", "tvm-threads": "TVM ThreadedSession"}


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--rounds", type=int, default=9, help="interleaved rounds, at least 9 (default)")
    p.add_argument("--peer", default="mpi", choices=list(PEERS), help="what runs beside")
    p.add_argument("--plot", metavar="FILE.png", help="also draw the results")
    return p


def refuse(why: str) -> NoReturn:
    """Say in one sentence why this cannot be measured, and end with status 2."""
    print(f"{os.path.basename(sys.argv[0])}: {why}", file=sys.stderr)
    sys.exit(2)


def check_rounds(rounds: int) -> None:
    """Refuse fewer rounds than a result may rest on."""
    if rounds < 9:
        refuse(f"--rounds {rounds}: medians of fewer than 9 rounds say little")


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


def _cpu() -> str:
    """Return the name of the processor, or where Linux does not tell it, its architecture."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def emit_header(sess: di.Session, peer: str, **more: Any) -> None:
    """Print where and with what this runs."""
    from mpi4py import MPI  # not above: TVM's worker processes must not initialise it

    emit(
        {
            "bench": "environment",
            "date": datetime.date.today().isoformat(),
            "n": sess.num_workers,
            "peer": PEERS[peer],
            "spmd_disco": di.__version__,
            "native": native.available(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "mpi": " ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))]),
            "machine": platform.machine(),
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            **more,
        }
    )


def draw(
    path: str | os.PathLike[str],
    panels: Mapping[str, Mapping[str, Curve]],
    xlabel: str,
    ylabel: str,
    *,
    cores: int | None = None,
    limit: tuple[str, float] | None = None,
) -> None:
    """Draw medians, with minima and maxima as bands, log-log.

    Parameters
    ----------
    path : path-like
        Where the picture goes.
    panels : dict
        For each title the curves by their labels; those with equal labels look alike.
    xlabel, ylabel : str
        What the axes are.
    cores : int, optional
        Mark what is to the right of this as more workers than cores.
    limit : (str, float), optional
        A horizontal line and its label.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(4.2 * columns, 3.4 * lines), squeeze=False, layout="constrained"
    )
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        for label, curve in curves.items():
            at = labels.index(label)
            xs = [x for x, _ in curve]
            low, middle, high = ([y[key] for _, y in curve] for key in ("min", "median", "max"))
            look = {"color": f"C{at}", "marker": "os^vD"[at % 5], "markersize": 4}
            axis.plot(xs, middle, "-" if at == 0 else "--", label=label, **look)
            axis.fill_between(xs, low, high, alpha=0.2, color=f"C{at}")
        axis.set(xscale="log", yscale="log", title=title, xlabel=xlabel, ylabel=ylabel)
        axis.grid(which="both", alpha=0.3)
        if cores is not None:
            ticks = sorted({x for curve in curves.values() for x, _ in curve})
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
            axis.xaxis.set_minor_locator(NullLocator())
            edge = axis.get_xlim()[1]
            if edge > cores:
                text = f"more workers than\nthe {cores} cores"
                axis.axvspan(cores * 1.1, edge, color="grey", alpha=0.12, label=text)
            axis.set_xlim(right=edge)
        if limit is not None:
            axis.axhline(limit[1], color="grey", linestyle=":", label=limit[0])
        axis.legend(fontsize="small")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    figure.savefig(path, dpi=100)


def curves_of(rows: Sequence[Mapping[str, Any]], x: str) -> dict[str, dict[str, Curve]]:
    """Sort rows into panels by what they measured: ours and the peer's values over `x`."""
    panels: dict[str, dict[str, Any]] = {}
    for row in rows:
        curves = panels.setdefault(row["bench"], {})
        for key, label in (("ours", "spmd_disco"), ("peer", row["peer_name"])):
            if key in row:
                curves.setdefault(label, []).append((row[x], row[key]))
    return panels

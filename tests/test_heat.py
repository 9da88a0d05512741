"""The heat example: the same bits on any number of workers, a picture, a progress bar."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich", reason="pip install -e '.[examples]' brings what the example needs")
image = pytest.importorskip("matplotlib.image", reason="pip install -e '.[examples]' brings it")

REPO = pathlib.Path(__file__).parent.parent
HEAT = REPO / "docs" / "examples" / "heat.py"
#: 21 inner rows: 7 for each of 3 workers, and uneven shares for 4.
SIZE = 23
STEPS = 45

DRIVER = f"""
import sys
sys.path.insert(0, {str(HEAT.parent)!r})
import heat, numpy as np
with heat.di.session() as sess:
    bar = heat.Progress(disable=True)
    np.save(sys.argv[1], heat.solve(sess, heat.plate({SIZE}), {STEPS}, bar))
    np.save(sys.argv[2], heat.plate({SIZE}))
"""


def one_point_at_a_time(field: np.ndarray, rate: float) -> np.ndarray:
    """Do the time steps in plain Python, with the example's order of additions."""
    old = field.tolist()
    inner = range(1, len(old) - 1)
    for _ in range(STEPS):
        new = [row[:] for row in old]
        for i in inner:
            for j in inner:
                near = old[i - 1][j] + old[i + 1][j] + old[i][j - 1] + old[i][j + 1]
                new[i][j] = old[i][j] + rate * (near - 4 * old[i][j])
        old = new
    return np.array(old)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_equals_the_serial_result_bit_for_bit(
    ranks: int, run_job: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    result, start = tmp_path / "result.npy", tmp_path / "start.npy"
    job = run_job(ranks, "-m", "spmd_disco", "-c", DRIVER, result, start)
    assert job.status == 0, str(job)
    field = np.load(result)
    assert field.tobytes() == one_point_at_a_time(np.load(start), 0.2).tobytes()
    assert not np.array_equal(field, np.load(start))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_checks_itself_and_draws(
    ranks: int, run_job: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    picture = tmp_path / "heat.png"
    arguments = ("--size", str(SIZE), "--steps", str(STEPS), "--out", picture, "--check")
    job = run_job(ranks, "-m", "spmd_disco", HEAT, *arguments)
    assert job.status == 0, str(job)
    lines = job.stdout.splitlines()
    assert lines[0].startswith(f"{STEPS} steps in "), str(job)
    assert lines[1:] == ["the same bits as one worker gets"], str(job)
    assert "━" not in job.stderr, "a progress bar, and there is no terminal"
    pixels = image.imread(picture)[..., :3]
    assert pixels.shape == (500, 600, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100
    inside = pixels[50:430, 80:450]  # of the axes
    red, blue = inside[..., 0] - inside[..., 2] > 0.3, inside[..., 2] - inside[..., 0] > 0.3
    for what, share in (("hot", red.mean()), ("cold", blue.mean())):
        assert 0.005 < share < 0.5, f"{share:.1%} of the picture is {what}"


def test_progress_bar_on_a_terminal(
    run_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    job = run_job(2, "-m", "spmd_disco", HEAT, "--size", "16", "--steps", "100")
    assert job.status == 0, str(job)
    assert "━━" in job.stderr, str(job)
    assert "100%" in job.stderr, str(job)


def test_refuses_fewer_rows_than_workers(run_job: Callable[..., Any]) -> None:
    job = run_job(3, "-m", "spmd_disco", HEAT, "--size", "4")
    assert job.status == 1, str(job)
    assert "heat.py: 3 workers need --size 5 or more" in job.stderr, str(job)
    assert "Traceback" not in job.stderr, str(job)


def test_says_that_it_wants_mpi(run_job: Callable[..., Any]) -> None:
    job = run_job(0, "-m", "spmd_disco", "-n", "2", HEAT)
    assert job.status == 1, str(job)
    assert "heat.py: its workers exchange rows by MPI: start it with mpirun" in job.stderr
    assert "Traceback" not in job.stderr, str(job)

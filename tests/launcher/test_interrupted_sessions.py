"""Ctrl-C while a session opens, works or closes: the next one opens, and the job ends."""

from __future__ import annotations

import pytest

APP = """
import random, signal, sys, threading
import spmd_disco as di

random.seed(int(sys.argv[2]))
main = threading.main_thread().ident

def strike(within):
    after = 0.001 + within * random.random()
    timer = threading.Timer(after, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    return timer

struck = 0
for i in range(30):
    sess = timer = None
    try:
        try:
            if sys.argv[1] == "open":
                timer = strike(0.015)
            sess = di.MPISession()
            if sys.argv[1] != "open":
                timer = strike(0.005)
            sess.call(len, "abc").get_all()
            sess.shutdown()
        finally:
            if timer is not None:
                timer.join()
    except KeyboardInterrupt:
        struck += 1
    sess = None
with di.MPISession() as sess:
    print(struck > 5, sess.call(len, "abc").get_all())
"""


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("when", ["open", "later"])
def test_interrupts_at_random(when, seed, run, app):
    ended = run(3, app(APP), when, str(seed))
    assert (ended.status, ended.lines, ended.err) == (0, ["True [3, 3, 3]"], "")

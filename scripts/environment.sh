# Sourced by scripts/quickstart, scripts/test, scripts/docs and .ci/run: makes a virtual environment and
# installs packages, where they are missing.
# usage: install_into_venv "[test]"   (extras of setup.cfg, or nothing); sets $venv, its folder, and $bin,
# the folder of its programs

# The folder of the programs of a virtual environment: Scripts on Windows, otherwise bin.
bin_of() {
    if [ -d "$1/Scripts" ]; then echo "$1/Scripts"; else echo "$1/bin"; fi
}

# The folder is .venv. PYTHON=python3.13 chooses another Python, whose folder is .venv-3.13.
install_into_venv() {
    local extras="${1:-}" python wanted
    venv=.venv
    if [ -n "${PYTHON:-}" ]; then
        if ! venv=.venv-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
            echo "error: PYTHON must name a Python that runs; got $PYTHON" >&2
            exit 1
        fi
    fi
    if [ ! -x "$(bin_of "$venv")/pip" ]; then  # also if an earlier attempt was interrupted
        rm -rf "$venv"
        for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14 py python}; do
            if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                echo "Making $venv with $("$python" --version) ..."
                "$python" -m venv "$venv" && break
                echo "error: $python cannot make a virtual environment; on Debian or Ubuntu: apt install python3-venv" >&2
                rm -rf "$venv"
                exit 1
            fi
        done
        if [ ! -x "$(bin_of "$venv")/pip" ]; then
            echo "error: Python 3.11 or newer is needed, and was not found in ${PYTHON:-the PATH}; install it and try again" >&2
            exit 1
        fi
    fi
    bin=$(bin_of "$venv")
    # The file "installed" records this checkout, the extras and a checksum of the files that list the
    # requirements, so that the network is used only if one of them has changed.
    wanted="$PWD: $extras $(cat setup.cfg pyproject.toml | cksum)"
    if ! grep -qxF "$wanted" "$venv/installed" 2>/dev/null; then
        echo "Installing attention_jax$extras and what it needs into $venv (a minute or two) ..."
        "$bin/python" -m pip install --quiet --disable-pip-version-check --editable ".$extras"
        # Only one checkout is installed at a time, so the lines of other checkouts are dropped.
        { grep -F "$PWD: " "$venv/installed" 2>/dev/null || true; echo "$wanted"; } > "$venv/installing"
        mv "$venv/installing" "$venv/installed"
    fi
}

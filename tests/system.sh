#!/usr/bin/env bash
# Install what tests use of Debian, as root: a Slurm, network namespaces, Prometheus.
# Names what could not be installed; tests that need it skip. Status 0 in both cases.
set -uo pipefail
packages=(slurmctld slurmd slurm-client iproute2 prometheus)

missing() {
    local package
    for package in "${packages[@]}"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            echo "$package"
    done
}

get() {
    DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -y --no-install-recommends \
        -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o DPkg::Lock::Timeout=60 "$@"
}

mapfile -t names < <(missing)
output=
if ((${#names[@]} && EUID == 0)); then
    output=$(
        get update 2>&1
        get install "${names[@]}" 2>&1 ||
            for name in "${names[@]}"; do get install "$name" 2>&1; done
    )
    mapfile -t names < <(missing)
fi
if ((${#names[@]})); then
    grep '^[EW]:' <<<"$output" | sort -u
    echo "not installed, so that tests skip:" "${names[@]}"
    echo "make system installs it, as root of a Debian with a package index."
fi
exit 0

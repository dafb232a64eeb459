#!/usr/bin/env bash
# Install the schedulers without which tests are skipped, where that is possible: on Debian and its like, as root.
# Says what was installed, or why nothing was.
set -uo pipefail
declare -A package=([slurmctld]=slurmctld [slurmd]=slurmd [srun]=slurm-client [munged]=munge)
missing=()
for program in "${!package[@]}"; do
    PATH="$PATH:/usr/sbin" command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
if [ ${#missing[@]} = 0 ]; then
    echo "schedulers: all are installed"
elif ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "schedulers: ${missing[*]} cannot be installed here (needs apt-get, as root); their tests are skipped"
elif (timeout 120 apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
    timeout 300 apt-get -qq install -y --no-install-recommends "${missing[@]}") >/dev/null 2>&1; then
    echo "schedulers: installed ${missing[*]}"
else
    echo "schedulers: apt-get could not install ${missing[*]}; their tests are skipped"
fi

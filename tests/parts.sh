#!/bin/sh
# Install what the tests start beside Python: Prometheus with promtool, Alertmanager with amtool, openssl, the network
# tools for the slow link, Chromium, npm for Grafana's types, what verifies units of systemd, Slurm, and two shells.
set -eu
missing=""
command -v promtool >/dev/null || missing="$missing prometheus"
command -v amtool >/dev/null || missing="$missing prometheus-alertmanager"
command -v openssl >/dev/null || missing="$missing openssl"
command -v ip >/dev/null && command -v tc >/dev/null || missing="$missing iproute2"
command -v nft >/dev/null || missing="$missing nftables"
command -v chromium-headless-shell >/dev/null || missing="$missing chromium-headless-shell"
command -v npm >/dev/null || missing="$missing npm"
command -v systemd-analyze >/dev/null || missing="$missing systemd"
command -v unshare >/dev/null && command -v setpriv >/dev/null || missing="$missing util-linux"
for part in slurmctld slurmd munge; do
    command -v "$part" >/dev/null || missing="$missing $part"
done
command -v srun >/dev/null || missing="$missing slurm-client"
command -v shellcheck >/dev/null || missing="$missing shellcheck"
for part in fish zsh; do
    command -v "$part" >/dev/null || missing="$missing $part"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed:$missing (needs root and apt-get); the tests that use them will skip"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing >/dev/null

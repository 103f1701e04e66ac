#!/bin/sh
# Install what `make image-proof` needs: buildah and podman with runc, and mmdebstrap for the base image and another Python.
set -eu
missing=""
for part in buildah podman runc mmdebstrap; do
    command -v "$part" >/dev/null || missing="$missing $part"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed:$missing (needs root and apt-get)" >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing >/dev/null

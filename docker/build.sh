#!/bin/sh
# Build one of the images: docker/build.sh TARGET IMAGE [OPTIONS OF THE BUILDER]
# BUILDER is the command that builds, by default `docker buildx build --load`.
set -eu
target=$1 image=$2
shift 2
case $target in
worker | train) torch= ;;                                          # What PyPI has: for CUDA.
worker-cpu | launcher) torch=https://download.pytorch.org/whl/cpu ;; # 4 GB less.
*)
    echo "docker/build.sh: the target is '$target', expected worker, worker-cpu, launcher or train" >&2
    exit 2
    ;;
esac
cd "$(dirname "$0")/.."
grep -q '^ARG BASE_IMAGE=.*@sha256:' docker/Dockerfile || echo "docker/build.sh: base images have no digests, see docker/pin.sh" >&2
exec ${BUILDER:-docker buildx build --load} --build-arg "TORCH_INDEX=$torch" "$@" --file docker/Dockerfile --target "$target" --tag "$image" .

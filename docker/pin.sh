#!/bin/sh
# Pin by digest the images that ours are built from and that the manifests name, in place. Needs docker buildx and their registries.
# docker/pin.sh [FOLDER]: where the files lie, by default here. Run again, it takes the digests that the tags have now.
set -eu
cd "${1:-$(dirname "$0")}"
files=$(find . -name '*Dockerfile' -o -name '*.yaml')
# Ours, of registry.example.com, are yours to name.
images=$(grep -hoE '(docker\.io|gcr\.io)/[a-z0-9._/-]+:[A-Za-z0-9._-]+' $files | sort -u)
for image in $images; do
    digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$image")
    echo "$digest" | grep -qxE 'sha256:[0-9a-f]{64}' || { echo "docker/pin.sh: $image has the digest '$digest'" >&2; exit 1; }
    sed -i -E "s#$image(@sha256:[0-9a-f]+)?\$#$image@$digest#" $files
done

#!/bin/sh
# Pin everything that the images hold, in torch.txt and requirements.txt; versions that still fit stay. Needs uv.
# docker/lock.sh [FOLDER]: where the two files lie, by default here.
set -eu
folder=$(realpath "${1:-$(dirname "$0")}")
cd "$(dirname "$0")/.."
compile() {
    uv pip compile --quiet --no-header --no-annotate --no-emit-index-url --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --constraint constraints.txt "$@"
}
extras="--extra gcp --extra hdf5 --extra heif --extra timm --extra fasttext --extra train --extra figures --extra duplicates"
# What is of torch alone is left to torch.txt: its builds for CUDA and for the CPU need different packages.
leave=$(sed -nE 's/^((torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+))==.*/--no-emit-package \1/p' "$folder/torch.txt")
compile pyproject.toml $extras $leave --output-file "$folder/requirements.txt"
printf 'torch\ntorchvision\n' | compile --constraint "$folder/requirements.txt" - --output-file "$folder/torch.txt"

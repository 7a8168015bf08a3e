#!/bin/sh
# Entry point of the images, for platforms that can set it and those that cannot, such as AWS Batch. Runners of Beam start a worker with
# flags alone: words that begin with "-" go to Beam's program `boot`. Anything else is a command.
set -eu
case ${1-} in
"") exec imagepivot --help ;;
-*)
    PATH=$PATH:/opt/apache/beam
    if ! command -v boot >/dev/null; then
        echo "$1: this image has no worker of Beam; give a command, e.g. imagepivot --help, or use the image worker" >&2
        exit 2
    fi
    exec boot "$@"
    ;;
*) exec "$@" ;;
esac

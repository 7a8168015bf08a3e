# Beam's program that starts workers, from its source: where the image that Beam publishes cannot be pulled, give what this
# builds as BEAM_SDK. GO_IMAGE is any image with Go; docker/pin.sh adds its digest. The result is one file, and is never run itself.
ARG GO_IMAGE=docker.io/library/golang:1.26-bookworm
FROM ${GO_IMAGE} AS build
ARG BEAM_VERSION=2.77.0
RUN CGO_ENABLED=0 GOBIN=/out go install -trimpath -ldflags='-s -w' github.com/apache/beam/sdks/v2/python/container@v${BEAM_VERSION} \
    && cp "$(go env GOMODCACHE)/github.com/apache/beam/sdks/v2@v${BEAM_VERSION}/LICENSE" /out/LICENSE \
    && mv /out/container /out/boot

FROM scratch
COPY --from=build /out/ /opt/apache/beam/

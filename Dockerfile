# syntax=docker/dockerfile:1

FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock README.md ./
COPY src ./src
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    --mount=type=cache,target=/src/target \
    cargo build --release --locked --bin goodput \
    && cp target/release/goodput /usr/local/bin/goodput

FROM debian:bookworm-slim
LABEL org.opencontainers.image.title="goodput" \
      org.opencontainers.image.description="Inline SLO-aware gateway for LLM inference engines" \
      org.opencontainers.image.licenses="Apache-2.0"
# Roots for engines that are spoken to over TLS.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /usr/local/bin/goodput /usr/local/bin/goodput
COPY LICENSE /usr/share/doc/goodput/LICENSE
# A number, so that runAsNonRoot can be checked without a user database. Nothing is written
# to the file system: the root may be read-only.
USER 65532:65532
EXPOSE 8080 9090
# Mount the settings over /etc/goodput. SIGTERM drains; give it shutdown.delay + shutdown.drain.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=4s --start-period=5s --retries=3 \
    CMD ["/usr/local/bin/goodput", "health", "--url", "http://127.0.0.1:9090/readyz"]
ENTRYPOINT ["/usr/local/bin/goodput"]
CMD ["serve", "-c", "/etc/goodput/goodput.yaml"]

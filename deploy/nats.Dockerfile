# The official image with a folder that its volume lets anybody write to, so that it need not run as root.
FROM nats:2.15.0-alpine
RUN install -d -m 1777 /data
USER 10001:10001

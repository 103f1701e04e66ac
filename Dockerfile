# The agent: no torch, no compiler, not root. `docker build -t commwatch .`; settings: docs/deploy.md.
# BASE is any image with Python 3.10 or later as `python3`, and its `venv`. EXTRAS=otlp,hooks adds the native hook for trainers, which the
# image passes on but does not use, from the wheel of `make hooks` in dist/.
ARG BASE=python:3.13-slim
FROM ${BASE} AS build
ARG EXTRAS=otlp
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install --no-cache-dir --find-links dist ".[${EXTRAS}]" && /opt/venv/bin/pip uninstall --yes pip

FROM ${BASE}
# The same path as where it was made: the commands in it begin with it.
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 COMMWATCH_DIR=/run/commwatch COMMWATCH_STATE=/var/lib/commwatch
RUN install -d -o 65532 -g 65532 -m 0700 /run/commwatch /var/lib/commwatch
USER 65532:65532
EXPOSE 9477
VOLUME ["/run/commwatch", "/var/lib/commwatch"]
# The agent announces its address in its run directory. Its certificate is for other names than this one's, so it is not verified.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import os, pathlib, ssl, urllib.request; from commwatch.wire import announcement as a, crossing; urllib.request.urlopen(a.answering(pathlib.Path(os.environ['COMMWATCH_DIR']), crossing.own()).url + '/healthz', timeout=4, context=ssl._create_unverified_context())"]
ENTRYPOINT ["commwatch"]
CMD ["agent"]

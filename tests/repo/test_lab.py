"""``make lab`` serves the notebooks where there is no browser, for root as well, at a given address."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import pytest

pytestmark = [pytest.mark.process, pytest.mark.peers]

pytest.importorskip("jupyterlab")
pytest.importorskip("papermill")

ROOT = Path(__file__).parents[2]
TOKEN = "a-token"


def test_jupyterlab_opens_on_the_first_notebook_at_the_given_address(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--port={port}", "--ip=127.0.0.1", f"--IdentityProvider.token={TOKEN}", "--ServerApp.port_retries=0"]
    command = [sys.executable, "-m", "ropelab.study", "--build", str(tmp_path / "build"), "lab", "--", *options]
    with (tmp_path / "log").open("w") as log:
        # No browser starts for users other than root either.
        environment = os.environ | {"PYTHONPATH": str(ROOT), "BROWSER": "true", "JUPYTER_CONFIG_DIR": str(tmp_path)}
        server = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        page = opened(f"http://127.0.0.1:{port}/?token={TOKEN}", server, tmp_path / "log")
        assert page.url.split("?")[0] == f"http://127.0.0.1:{port}/lab/tree/notebooks/00_tour.ipynb"
        assert page.status == 200
        server.send_signal(signal.SIGTERM)
        server.wait(300)
    finally:
        server.kill()


def opened(url, server, log):
    """The answer to a request, once the server is there."""
    limit = time.monotonic() + 300
    while time.monotonic() < limit:
        assert server.poll() is None, log.read_text()
        try:
            return build_opener(ProxyHandler({})).open(url, timeout=60)
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    pytest.fail(log.read_text())

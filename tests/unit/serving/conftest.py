"""Fixtures: one server of a tiny model for the tests of this folder."""

import httpx
import pytest
from served import make_folder, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def server(folder):
    with serving(folder) as running:
        yield running


@pytest.fixture(scope="session")
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client

import pytest
import tiny


@pytest.fixture(autouse=True)
def one_thread():
    tiny.one_thread()

"""What the tests of this member share: the communications that they are run over."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for ``zero_ranks``, here and on the ranks

COMMUNICATIONS = ("gloo", pytest.param("shm", marks=pytest.mark.long))


@pytest.fixture(params=COMMUNICATIONS)
def communication(request):
    """Name of the communication backend."""
    return request.param

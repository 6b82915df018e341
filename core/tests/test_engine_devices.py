import pytest

from polyscale.engine.runtime import shared_devices


@pytest.mark.parametrize(
    ("ranks", "devices", "mask", "said"),
    [
        (1, 1, None, ""),
        (4, 4, "0,1,2,3", ""),
        (4, 1, "3", ""),  # a mask for each rank
        (2, 1, None, "2 ranks share 1 visible device, which some backends refuse. Start at most 1"),
        (8, 2, "0,1", "8 ranks share 2 visible devices, which some backends refuse. Start at most 2 on this host"),
    ],
)
def test_ranks_that_share_devices_are_told(ranks, devices, mask, said):
    found = shared_devices(ranks, devices, mask)
    assert found.startswith(said) and bool(found) == bool(said)

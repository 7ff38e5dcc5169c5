"""`provider`: the triton provider, under the name by which tests of the other providers ask for theirs."""

import pytest

from tests.custom_ops.triton.addresses import check_addresses
from tests.custom_ops.triton.on_device import TritonOnDevice, quicken_interpreter


@pytest.fixture(scope="module")
def provider():
    pytest.importorskip("triton")
    quicken_interpreter()
    check_addresses()
    return TritonOnDevice()

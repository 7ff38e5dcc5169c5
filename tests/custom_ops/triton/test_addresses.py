"""The interpreter's addresses are checked: a kernel that goes too far is told so, and one that masks is not."""

import pytest
import torch

from tests.custom_ops.triton.on_device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a check of the interpreter")


@pytest.fixture(scope="module")
def copy(provider):
    from tests.custom_ops.triton.copying import copy_kernel

    return copy_kernel


@pytest.mark.parametrize("what", ["load", "store"])
def test_what_lies_beyond_a_tensor_is_refused(copy, what):
    short, long = torch.zeros(5), torch.zeros(8)
    copy[(1,)](long, torch.zeros(8), 8, BLOCK=8)
    with pytest.raises(Exception, match=f"3 of 8 addresses of a {what}"):
        copy[(1,)](*((short, long) if what == "load" else (long, short)), 8, BLOCK=8)


def test_what_is_masked_or_in_another_view_of_the_storage_is_not(copy):
    whole, out = torch.arange(9.0), torch.zeros(8)
    copy[(1,)](whole[4:], out, 5, BLOCK=8)
    assert out.tolist() == [4, 5, 6, 7, 8, 0, 0, 0]
    copy[(1,)](whole[:1], out, 8, BLOCK=8)  # the storage goes on behind the view

# SPDX-License-Identifier: Apache-2.0
"""What arrays take of memory, and which counts of blocks kernels can address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.dispatch import PLATFORMS
from pallas_kernels.paged_attention.triton import supports
from pallas_kernels.storage import NONE, STORAGE, beyond_signed_offsets, padded_bytes, served_count

GIB = 1 << 30


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((8, 128), "bfloat16", 2048),
        ((3, 64), "bfloat16", 4 * 128 * 2),
        ((1, 128), "int8", 512),
        ((5, 9, 130), "float32", 5 * 16 * 256 * 4),
        ((8, 16), "float32", 4096),
        ((12, 128), "int8", 2048),
    ],
)
def test_bytes_of_an_array_on_a_tpu_are_those_of_its_tiles(shape, dtype, size):
    assert padded_bytes(shape, dtype) == size


def test_every_platform_says_how_arrays_lie_in_its_memory():
    assert set(STORAGE) == set(PLATFORMS)
    assert [STORAGE[name].num_bytes((3, 64), "bfloat16") for name in PLATFORMS] == [384, 384, 1024]


def test_what_the_gpus_kernel_declines_is_what_its_storage_says():
    facts = {"dtype": "bfloat16", "head_dim": 128, "v_head_dim": 128, "kv_format": "int8", "latent": 0}
    sizes = beyond_signed_offsets("int8")
    for codes in (1, sizes.start - 1, sizes.start, 3 * GIB, sizes.stop - 1, sizes.stop, 9 * GIB):
        assert bool(supports(**facts, pool_codes=codes)) == (codes in sizes)
    assert beyond_signed_offsets("bfloat16") == NONE


UNITS = st.lists(st.integers(1 << 10, 1 << 24), min_size=1, max_size=3)


@given(UNITS, st.integers(1, 1 << 22), st.integers(1, 1 << 22))
def test_a_count_that_is_served_is_the_next_one_up_or_else_the_next_one_down(units, wanted, most):
    gaps = [(unit, beyond_signed_offsets("int8")) for unit in units]

    def declined(count):
        return any(count * unit in sizes for unit, sizes in gaps)

    count = served_count(wanted, most, gaps)
    assert not declined(count)
    if count >= wanted:
        assert count <= most
        # Gaps are runs, so that nothing lies between if its ends do not.
        assert count == wanted or (declined(wanted) and declined(count - 1))
    else:
        assert declined(count + 1) or count == most

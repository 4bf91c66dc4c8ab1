"""How numbers travel between islands."""

import pytest
import torch

from hfdist.config.islands import Codec
from hfdist.islands.codec import decode, encode

LARGEST_ERRORS = {Codec.fp32: 0.0, Codec.bf16: 2**-8, Codec.int8: 0.5 / 127, Codec.fp4: 0.25}
"""As shares of the largest number of a block."""


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("number", [0, 1, 255, 256, 257, 1001])
def test_numbers_come_back_nearly_and_take_as_many_bytes_as_it_says(codec, number):
    values = torch.randn(number, generator=torch.Generator().manual_seed(number)) * torch.logspace(-6, 2, number or 1)
    content = encode(codec, values[:number])
    assert len(content) == codec.num_bytes(number)
    back = decode(codec, content, number)
    assert back.dtype is torch.float32
    assert back.shape == (number,)
    for block, found in zip(values[:number].split(256), back.split(256), strict=True):
        if not number:
            break
        assert (block - found).abs().max() <= LARGEST_ERRORS[codec] * block.abs().max() * (1 + 1e-5)


@pytest.mark.parametrize("codec", Codec)
def test_what_has_come_through_once_stays_as_it_is(codec):
    values = torch.randn(700, generator=torch.Generator().manual_seed(0))
    once = decode(codec, encode(codec, values), 700)
    assert torch.equal(decode(codec, encode(codec, once), 700), once)


@pytest.mark.parametrize("codec", Codec)
def test_zeros_stay_zeros_and_signs_stay(codec):
    assert torch.equal(decode(codec, encode(codec, torch.zeros(300)), 300), torch.zeros(300))
    values = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.25])
    assert torch.equal(decode(codec, encode(codec, values), 5).sign(), values.sign())


def test_fp4_takes_the_nearest_size():
    values = torch.tensor([1.0, 0.76, 0.74, -0.3, 0.2, 1 / 64, 0.007, -0.9])
    wanted = torch.tensor([1.0, 1.0, 0.5, -0.25, 0.25, 1 / 64, 0.0, -1.0])
    assert torch.equal(decode(Codec.fp4, encode(Codec.fp4, values), 8), wanted)


@pytest.mark.parametrize("codec", Codec)
def test_other_bytes_are_refused(codec):
    with pytest.raises(ValueError, match="are not 10 numbers"):
        decode(codec, encode(codec, torch.ones(10)) + b"0", 10)

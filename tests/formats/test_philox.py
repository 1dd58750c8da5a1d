"""The random numbers are those of Philox4x32-10, by its authors' known answers, and depend on positions."""

from __future__ import annotations

import pytest
import torch

from quantexp.extras.verify import draws as gold
from quantexp.formats import philox
from quantexp.formats.layout import Place
from quantexp.formats.philox import philox4x32, random_integers, random_integers_at
from quantexp.processes.threads import threads as using_threads

CPU = torch.device("cpu")
#: Counter, key and words, from the file of known answers that comes with Random123.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_results_are_the_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == words
    a, b, c, d = (torch.tensor([word]) for word in counter)
    tensors = philox4x32((a, b, c, d), key)
    assert tuple(int(word) for word in tensors) == words


@pytest.fixture(params=["compiled", "torch"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code where there is a compiler, and torch's."""
    if request.param == "torch":
        monkeypatch.setattr(philox, "_draws", lambda _: False)


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("seed", [0, 1, 2**32 + 7, 2**64 - 1])
@pytest.mark.parametrize("offset", [0, 3, 2**40, 2**64 - 1])
def test_numbers_follow_from_seed_offset_and_index(seed: int, offset: int) -> None:
    expected = gold.random_integers(41, seed, offset).tolist()
    assert random_integers(41, seed, offset, CPU).tolist() == expected


def test_an_index_beyond_32_bits_has_a_counter_of_its_own() -> None:
    start = (1 << 34) - 4
    index = torch.arange(start // 4, start // 4 + 2)
    words = philox4x32((index & 0xFFFFFFFF, index >> 32, 5, 6), (7, 8))
    got = torch.stack([torch.as_tensor(word) for word in words], dim=1).flatten() >> 8
    seed, offset = 7 + (8 << 32), 5 + (6 << 32)
    assert got.tolist() == [gold.random_integer(start + i, seed, offset) for i in range(8)]


def test_compiled_code_draws_the_same_in_any_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, shape = Place((3, 2**33, 7), (1, 2**32 - 3, 2)), (2, 3000, 5)
    drawn = []
    for threads in (1, 2):
        with using_threads(threads):
            drawn += [
                random_integers(30_001, 3, 4, CPU),
                random_integers_at(place, shape, 3, 4, CPU),
            ]
    monkeypatch.setattr(philox, "_draws", lambda _: False)
    for numbers, at in (drawn[:2], drawn[2:]):
        assert torch.equal(numbers, random_integers(30_001, 3, 4, CPU))
        assert torch.equal(at, random_integers_at(place, shape, 3, 4, CPU))


def test_the_size_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_integers(1000, 1, 2, CPU)
    monkeypatch.setattr(philox, "_CHUNK", 16)
    assert torch.equal(random_integers(1000, 1, 2, CPU), whole)
    assert torch.equal(random_integers(100, 1, 2, CPU), whole[:100])
    assert random_integers(0, 1, 2, CPU).shape == (0,)


def test_numbers_are_spread_evenly_over_24_bits() -> None:
    """Mean and each bit of 2^20 numbers, within five standard deviations."""
    numbers = random_integers(1 << 20, 9, 0, CPU).double()
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 2**24
    deviation = 2**24 / 12**0.5 / 2**10
    assert abs(float(numbers.mean()) - (2**24 - 1) / 2) < 5 * deviation
    for bit in range(24):
        ones = float((numbers.long() >> bit & 1).double().mean())
        assert abs(ones - 0.5) < 5 * 0.5 / 2**10


@pytest.mark.parametrize("whole", [(3, 7, 9), (2, 5, 16), (4, 6, 1)])
@pytest.mark.parametrize("chunk", [1 << 14, 4])
def test_a_part_has_the_numbers_that_its_elements_have_in_the_whole(
    whole: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(philox, "_CHUNK", chunk)
    count = whole[0] * whole[1] * whole[2]
    expected = torch.from_numpy(gold.random_integers(count, 5, 6)).float().view(whole)
    for n, t, k in [(0, 0, 0), (1, 2, 0), (0, 4, whole[2] // 2), (whole[0] - 1, 1, whole[2] - 1)]:
        wanted = expected[n:, t:, k:]
        place = Place(whole, (n, t, k))
        assert torch.equal(random_integers_at(place, wanted.shape, 5, 6, CPU), wanted)
    middle = expected[1:2, 1:4, : whole[2] - 1]
    assert torch.equal(random_integers_at(Place(whole, (1, 1, 0)), middle.shape, 5, 6, CPU), middle)


@pytest.mark.parametrize(
    ("shape", "start"),
    [((2, 3), (0, 0, 0)), ((2, 3, 4), (0, 1)), ((2, 3, 4), (1, 0, 0)), ((1, 3, 4), (0, -1, 0))],
)
def test_a_part_outside_the_whole_is_refused(
    shape: tuple[int, ...], start: tuple[int, ...]
) -> None:
    message = rf"a tensor of shape \({str(shape)[1:-1]}\) does not lie at \({str(start)[1:-1]}\) in one of \(2, 3, 4\)"
    with pytest.raises(ValueError, match=message):
        random_integers_at(Place((2, 3, 4), start), shape, 5, 6, CPU)

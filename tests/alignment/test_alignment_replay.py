"""The requests that are remembered: how many, how long, and which are learnt from."""

import threading

import torch

from hf_dynspec.alignment import FillingBuffer, ReplayBuffer, Trajectory


def numbered(number: int, bytes_of_features: int = 0) -> Trajectory:
    ids = torch.full((4,), number)
    top = (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3))
    rest = (torch.zeros(2), torch.zeros(2, dtype=torch.bool))
    return Trajectory(ids, 2, *top, *rest, torch.zeros(0, dtype=torch.int64), torch.zeros(bytes_of_features // 4))


def numbers(held) -> list[int]:
    return [int(one.token_ids[0]) for one in held]


def test_the_oldest_leave_first():
    buffer = ReplayBuffer(capacity=3)
    for number in range(5):
        assert buffer.add(numbered(number))
    assert numbers(buffer) == [2, 3, 4] and len(buffer) == 3
    assert buffer.nbytes == sum(one.nbytes for one in buffer) == 3 * (4 * 8 + 6 * 8 + 6 * 4 + 2 * 4 + 2)
    buffer.clear()
    assert not list(buffer) and buffer.nbytes == 0


def test_the_bytes_are_bounded():
    buffer = ReplayBuffer(capacity=100, largest_bytes=5000)
    for number in range(20):
        assert buffer.add(numbered(number, 1000))
        assert buffer.nbytes <= 5000
    assert numbers(buffer) == [16, 17, 18, 19]
    assert not buffer.add(numbered(20, 6000)) and numbers(buffer) == [16, 17, 18, 19]


def test_a_batch_has_the_newest_and_others_without_repeats():
    buffer = ReplayBuffer()
    random = torch.Generator().manual_seed(0)
    assert buffer.batch(4, random) == []
    for number in range(10):
        buffer.add(numbered(number))
    batches = [numbers(buffer.batch(4, random)) for _ in range(30)]
    assert all(batch[0] == 9 and len(set(batch)) == 4 for batch in batches)
    assert {number for batch in batches for number in batch} == set(range(10))
    assert sorted(numbers(buffer.batch(50, random))) == list(range(10)) and numbers(buffer.batch(1, random)) == [9]


def test_several_threads_share_a_buffer():
    buffer = ReplayBuffer(capacity=8)

    def add(start: int) -> None:
        for number in range(start, start + 200):
            buffer.add(numbered(number))
            assert len(list(buffer)) <= 8

    threads = [threading.Thread(target=add, args=(start,)) for start in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(buffer) == 8 and buffer.nbytes == sum(one.nbytes for one in buffer)


# Until it is full ----------------------------------------------------------------------------------------------------


def with_places(number: int, chosen: list[int]) -> Trajectory:
    """A request of six verified tokens, of which these are learnt from."""
    top = (torch.zeros(6, 3, dtype=torch.int64), torch.zeros(6, 3))
    rest = (*torch.zeros(2, 6), torch.zeros(6, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))
    is_chosen = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor(chosen), True)
    return Trajectory(torch.full((8,), number), 2, *top, *rest, is_chosen=is_chosen)


def test_a_buffer_gives_the_oldest_places_and_forgets_them():
    buffer = FillingBuffer(capacity=4)
    buffer.add(with_places(0, [1, 2, 5]))
    assert not buffer.is_full
    buffer.add(with_places(1, [0, 3, 4]))
    assert buffer.is_full
    first, second = buffer.take()
    assert first.is_chosen.nonzero()[:, 0].tolist() == [1, 2, 5]
    assert int(second.token_ids[0]) == 1 and second.is_chosen.nonzero()[:, 0].tolist() == [0]
    (rest,) = buffer
    assert rest.is_chosen.nonzero()[:, 0].tolist() == [3, 4] and buffer.nbytes == rest.nbytes
    assert not buffer.is_full
    assert [one.places for one in buffer.take()] == [2]
    assert buffer.take() == [] and len(buffer) == buffer.nbytes == 0


def test_its_requests_and_their_bytes_are_bounded():
    """Those of an adapter that is not the active one are not learnt from."""
    one = with_places(0, [0])
    buffer = FillingBuffer(capacity=100, largest_bytes=3 * one.nbytes)
    for number in range(5):
        buffer.add(with_places(number, [number]))
    assert [int(held.token_ids[0]) for held in buffer] == [2, 3, 4] and buffer.nbytes == 3 * one.nbytes

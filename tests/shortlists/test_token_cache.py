"""The caches of retrieved tokens, held against plain models of them over random traces."""

import random

import pytest

from hf_dynspec.shortlists.retrieval.cache import CACHES, AdaptiveReplacementCache, RecencyFrequencyCache

UNGUARDED = {"most_insertions": None, "residency": 0}


class PlainARC:
    """ARC in lists, least recently used first, as its paper and EvoSpec's appendix describe it."""

    def __init__(self, capacity, ghosts, warm_up, residency):
        self.c, self.g, self.warm_up, self.residency = capacity, ghosts, warm_up, residency
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []
        self.p, self.events, self.step, self.since = capacity / 2, 0, 0, {}

    def request(self, x):
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        again = x in self.b1 or x in self.b2
        if self.events >= self.warm_up:
            if x in self.b1:
                self.p = min(self.p + max(len(self.b2) / len(self.b1), 1), self.c)
            elif x in self.b2:
                self.p = max(self.p - max(len(self.b1) / len(self.b2), 1), 0)
        if len(self.t1) + len(self.t2) == self.c:
            order = [(self.t1, self.b1), (self.t2, self.b2)]
            for tokens, ghosts in order if len(self.t1) > self.p else order[::-1]:
                old = [one for one in tokens if self.step - self.since[one] >= self.residency]
                if old:
                    tokens.remove(old[0])
                    ghosts.append(old[0])
                    del ghosts[: -self.g]
                    break
            else:
                return False
        self.b1, self.b2 = [one for one in self.b1 if one != x], [one for one in self.b2 if one != x]
        (self.t2 if again else self.t1).append(x)
        self.since[x] = self.step
        return True


def zipf(rng, vocabulary, length):
    """Tokens of which few are frequent, and whose frequent ones drift."""
    return [int(vocabulary * rng.random() ** 3 + index // 200) % vocabulary for index in range(length)]


@pytest.mark.parametrize("seed", range(12))
def test_arc_is_the_plain_model(seed):
    rng = random.Random(seed)
    capacity = rng.choice([1, 2, 3, 7, 16, 40])
    settings = {"ghosts": rng.choice([1, capacity]), "warm_up": rng.choice([0, 20]), "residency": rng.choice([0, 3])}
    cache = AdaptiveReplacementCache(capacity, most_insertions=None, **settings)
    plain = PlainARC(capacity, **settings)
    for event in range(600):
        tokens = dict.fromkeys(zipf(rng, 90, rng.randint(1, 6)))
        cache.add(tokens)
        for token in tokens:
            plain.request(token)
        plain.events += 1
        assert list(cache._once) == plain.t1 and list(cache._again) == plain.t2
        assert list(cache._ghosts_of_once) == plain.b1 and list(cache._ghosts_of_again) == plain.b2
        assert cache.target_size == pytest.approx(plain.p)
        if event % 2:
            cache.advance()
            plain.step += 1
    assert len(cache) <= capacity and 0 <= cache.target_size <= capacity


@pytest.mark.parametrize("seed", range(8))
def test_lrfu_holds_the_tokens_that_were_worth_most_lately(seed):
    """Against sums over the whole past, for longer than units grow without being rescaled."""
    rng = random.Random(seed)
    capacity, decay = rng.choice([1, 3, 9]), rng.choice([0.5, 0.9])
    cache, worth = RecencyFrequencyCache(capacity, decay), {}
    for _ in range(600):
        tokens, is_weighted = list(dict.fromkeys(zipf(rng, 60, rng.randint(0, 12)))), rng.random() < 0.7
        weights = [rng.random() for _ in tokens] if is_weighted else None
        cache.add(tokens, weights)
        if is_weighted:
            worth = {token: decay * sum_ for token, sum_ in worth.items()}
        for token, weight in zip(tokens, weights or [0.1] * len(tokens), strict=True):
            worth[token] = worth.get(token, 0.0) + weight
        if rng.random() < 0.6:
            cache.take_changes()
            best = sorted(worth.values(), reverse=True)[:capacity]
            assert sorted((worth[one] for one in cache.slots().values()), reverse=True) == pytest.approx(best)


def test_lrfu_forgets_what_was_worth_most_once_and_never_again():
    cache = RecencyFrequencyCache(2)
    cache.add([1, 2], [1e6, 1e6])
    for token in range(10, 2000):
        cache.add([token], [1.0])
        cache.take_changes()
    assert set(cache.slots().values()) == {1998, 1999}


def test_lrfu_gives_up_the_last_of_the_first_tokens_first():
    cache = RecencyFrequencyCache(40)
    cache.fill(range(100, 140))
    for token in range(7):
        cache.add([token], [1e-6])
    assert cache.take_changes() == dict(zip(range(33, 40), range(7), strict=True))


def test_lrfu_weighs_as_many_positions_as_a_long_prompt_has():
    """All of them before the changes are taken: what the last ones were worth is beyond what floats hold otherwise."""
    cache = RecencyFrequencyCache(4)
    for position in range(20_000):
        cache.add([position % 50], [0.5])
    for token_id in (100, 101, 102, 103):
        cache.add([token_id], [0.9])
    cache.take_changes()
    assert set(cache.slots().values()) == {100, 101, 102, 103}
    for token_id in (200, 201, 202, 203):
        cache.add([token_id], [0.9])
    cache.take_changes()
    assert set(cache.slots().values()) == {200, 201, 202, 203}


def test_lrfu_adds_up_what_an_event_says_of_a_token():
    cache = RecencyFrequencyCache(1)
    cache.add([7, 8, 7], [0.3, 0.5, 0.3])
    assert list(cache.take_changes().values()) == [7]


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("seed", range(3))
def test_events_taken_in_together_are_taken_in_one_by_one(kind, seed, is_weighted):
    rng = random.Random(seed)
    one_by_one, together = CACHES[kind](24), CACHES[kind](24)
    for _ in range(60):
        events = [zipf(rng, 300, rng.randint(0, 40)) for _ in range(rng.randint(1, 30))]
        weights = [[rng.random() for _ in tokens] for tokens in events]
        for tokens, worth in zip(events, weights, strict=True):
            one_by_one.add(tokens, worth if is_weighted else None)
        all_weights = [weight for worth in weights for weight in worth] if is_weighted else None
        together.add([token for tokens in events for token in tokens], all_weights, list(map(len, events)))
        assert together.take_changes() == one_by_one.take_changes()
        assert together.slots() == one_by_one.slots()


def test_lrfu_takes_in_more_events_at_once_than_floats_could_tell_apart():
    cache = RecencyFrequencyCache(2)
    cache.add([*range(10, 20_010), 1, 2], [1e3] * 20_000 + [1.0, 1.0], [1] * 20_002)
    cache.add([3], [0.1])
    cache.take_changes()
    assert set(cache.slots().values()) == {20_009, 20_008}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("seed", range(4))
def test_slots_keep_their_place_and_changes_tell_the_rest(kind, seed):
    rng = random.Random(seed)
    cache, shown = CACHES[kind](16), {}
    for _ in range(500):
        cache.add(zipf(rng, 200, rng.randint(0, 60)))
        cache.refresh(zipf(rng, 200, 3))
        cache.advance(rng.randint(0, 3))
        if rng.random() < 0.5:
            shown.update(cache.take_changes())
            assert shown == cache.slots()
            assert len(set(shown.values())) == len(shown) <= 16
            # Without gaps: those after the last are not scored.
            assert sorted(shown) == list(range(len(shown)))
    assert all(one in cache for one in cache.slots().values())


def test_an_event_counts_a_token_once_and_brings_in_so_many():
    cache = AdaptiveReplacementCache(64, most_insertions=32)
    cache.add([5, 5, 5])
    cache.add(range(100, 200))
    assert set(cache.slots().values()) == {5, *range(100, 132)}
    # A token that is here already is no insertion.
    cache.add([*range(100, 132), 7])
    assert set(cache.slots().values()) == {5, 7, *range(100, 132)}


def test_nothing_is_evicted_before_its_time():
    cache = AdaptiveReplacementCache(4, residency=8)
    cache.add(range(4))
    for step in range(8):
        cache.add([100 + step])
        assert set(cache.slots().values()) == set(range(4))
        cache.advance()
    cache.add([200])
    assert 200 in cache and 0 not in cache


def test_the_target_size_stays_while_warming_up():
    cache = AdaptiveReplacementCache(2, warm_up=50, **UNGUARDED)
    for _ in range(25):
        cache.add([1, 2, 3])
        cache.add([3, 2, 1])
        assert cache.target_size == 1
    for _ in range(5):
        cache.add([1, 2, 3])
    assert cache.target_size != 1


@pytest.mark.parametrize("kind", CACHES)
def test_a_cleared_cache_is_a_new_one(kind):
    rng = random.Random(0)
    used, new = CACHES[kind](8), CACHES[kind](8)
    for _ in range(100):
        used.add(zipf(rng, 40, 4))
        used.advance()
    used.clear()
    assert len(used) == 0 and used.slots() == {} and used.take_changes() == {}
    for _ in range(100):
        tokens = zipf(rng, 40, 4)
        used.add(tokens)
        new.add(tokens)
        used.advance()
        new.advance()
        assert used.take_changes() == new.take_changes()
        assert used.slots() == new.slots()


@pytest.mark.parametrize("kind", CACHES)
def test_a_filled_cache_gives_up_the_last_tokens_first(kind):
    cache = CACHES[kind](6)
    cache.fill([10, 11, 12, 13])
    assert cache.slots() == {0: 10, 1: 11, 2: 12, 3: 13} and cache.take_changes() == {}
    cache.add([20, 21])
    assert set(cache.take_changes().values()) == {20, 21} and len(cache) == 6
    cache.add([13, 22])
    assert cache.take_changes() == {2: 22}
    cache.add([23])
    assert cache.take_changes() == {1: 23}
    assert set(cache.slots().values()) == {10, 13, 20, 21, 22, 23}
    cache.clear()
    assert cache.slots() == {}

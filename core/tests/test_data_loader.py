"""The loader: one global sequence of samples, whatever the number of ranks, workers and resumes."""

import random
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from polyscale import PolyscaleError, data
from polyscale.data import loader


def place(rank, ranks):
    return SimpleNamespace(dp_rank=rank, dp_size=ranks)


def group(length, ranks, batch, **options):
    """One loader per rank, and a function that takes ``n`` rounds of them all as one list of samples."""
    loaders = [
        loader(list(range(length)), topology=place(r, ranks), micro_batch_size=batch, **options) for r in range(ranks)
    ]
    return loaders


def take(loaders, rounds):
    """Samples of ``rounds`` rounds in global order, going through as many epochs as it takes."""
    iterators = [iter(one) for one in loaders]
    samples = []
    for _ in range(rounds):
        for i, one in enumerate(loaders):
            batch = next(iterators[i], None)
            if batch is None:
                iterators[i] = iter(one)
                batch = next(iterators[i])
            samples += batch.tolist()
    return samples


def test_an_epoch_holds_every_sample_once_and_the_next_one_another_order():
    (one,) = group(24, 1, 4)
    first, second = ([s for batch in one for s in batch.tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second and first != list(range(24))
    (again,) = group(24, 1, 4)
    assert [s for batch in again for s in batch.tolist()] == first
    (other,) = group(24, 1, 4, seed=1)
    assert [s for batch in other for s in batch.tolist()] != first


def test_the_sequence_is_the_same_at_every_number_of_ranks_and_batch_size():
    expected = take(group(48, 1, 1), 96)
    for ranks, batch in ((1, 4), (2, 2), (3, 4), (4, 6)):
        assert take(group(48, ranks, batch), 96 // (ranks * batch)) == expected


def test_ranks_take_neighbouring_parts_of_each_round():
    loaders = group(12, 2, 3, shuffle=False)
    batches = [[batch.tolist() for batch in one] for one in loaders]
    assert batches == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]


def test_two_ranks_then_one_then_three_give_the_same_samples():
    expected = take(group(36, 1, 1), 72)
    first = group(36, 2, 3)
    samples = take(first, 4)
    state = first[0].state_dict()
    assert state == first[1].state_dict()
    (second,) = group(36, 1, 2, seed=77)  # the state brings its own seed
    second.load_state_dict(state)
    samples += take([second], 3)
    third = group(36, 3, 2)
    for one in third:
        one.load_state_dict(second.state_dict())
    samples += take(third, 7)
    assert samples == expected
    assert {one.samples_seen for one in third} == {72}
    assert [one.epoch for one in third] == [2, 2, 2]


@pytest.mark.parametrize("stop", [1, 4, 5, 7])
@pytest.mark.parametrize("drop_last", [True, False])
def test_stop_and_resume_equals_going_on(stop, drop_last):
    def endless(one):
        while True:
            yield from one

    (straight,) = group(22, 1, 4, drop_last=drop_last)
    stream = endless(straight)
    expected = [next(stream).tolist() for _ in range(13)]
    (before,) = group(22, 1, 4, drop_last=drop_last)
    stream = endless(before)
    found = [next(stream).tolist() for _ in range(stop)]
    (after,) = group(22, 1, 4, drop_last=drop_last)
    after.load_state_dict(before.state_dict())
    stream = endless(after)
    found += [next(stream).tolist() for _ in range(13 - stop)]
    assert found == expected


def test_a_break_is_no_end_of_the_epoch():
    (one,) = group(24, 1, 4, shuffle=False)
    for batch in one:
        if batch.tolist()[0] == 4:
            break
    assert next(iter(one)).tolist() == [8, 9, 10, 11]
    assert [batch.tolist()[0] for batch in one] == [12, 16, 20]
    assert (one.epoch, one.position) == (1, 0)


def test_the_state_after_the_last_batch_is_the_next_epoch():
    (one,) = group(10, 1, 4)
    states = [one.state_dict() for _ in one]
    assert [(s["epoch"], s["position"], s["samples_seen"]) for s in states] == [(0, 4, 4), (1, 0, 8)]


def test_a_rest_that_fills_no_round_of_the_new_size_starts_the_next_epoch():
    (small,) = group(10, 1, 2)
    take([small], 4)
    (large,) = group(10, 1, 4)
    large.load_state_dict(small.state_dict())
    assert (large.epoch, large.position) == (1, 0)
    assert len(list(large)) == 2


def test_padding_wraps_around_and_gives_every_rank_the_same_number_of_batches():
    loaders = group(10, 2, 3, shuffle=False, drop_last=False)
    batches = [[batch.tolist() for batch in one] for one in loaders]
    assert batches == [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 0, 1]]]
    assert all(len(one) == 2 and one.samples_seen == 10 for one in loaders)
    (tiny,) = group(1, 1, 3, shuffle=False, drop_last=False)
    assert next(iter(tiny)).tolist() == [0, 0, 0]


def test_epochs_run_in_one_iteration_and_then_end():
    (one,) = group(8, 1, 4, epochs=3)
    assert len(one) == 6
    samples = [s for batch in one for s in batch.tolist()]
    assert len(samples) == 24 and sorted(samples[:8]) == list(range(8)) and samples[:8] != samples[8:16]
    assert list(one) == []
    (rest,) = group(8, 1, 4, epochs=3)
    rest.load_state_dict({**one.state_dict(), "epoch": 1, "position": 4})
    assert [s for batch in rest for s in batch.tolist()] == samples[12:]


def test_an_iterator_follows_a_loaded_state_and_its_twins():
    (one,) = group(24, 1, 4, shuffle=False)
    iterator = iter(one)
    state = one.state_dict()
    next(iterator), next(iterator)
    one.load_state_dict(state)
    assert next(iterator).tolist() == [0, 1, 2, 3]
    assert next(iter(one)).tolist() == [4, 5, 6, 7]
    assert next(iterator).tolist() == [8, 9, 10, 11]


class Noisy(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index, torch.rand(()), random.random(), numpy.random.rand()


def test_prefetched_batches_do_not_count_and_workers_are_repeatable():
    def make(workers=1):
        return loader(Noisy(), micro_batch_size=2, num_workers=workers)

    expected = [[column.tolist() for column in batch] for batch in make(workers=2)]
    one = make()
    iterator = iter(one)
    found = [[column.tolist() for column in next(iterator)] for _ in range(3)]
    assert (one.position, one.samples_seen) == (6, 6)  # though the worker has read further
    state = one.state_dict()
    iterator.close()
    resumed = make()
    resumed.load_state_dict(state)
    found += [[column.tolist() for column in batch] for batch in resumed]
    assert found == expected
    assert len({number for batch in expected for number in batch[1]}) == 24


def test_iterating_draws_nothing_from_the_global_generators():
    before = torch.get_rng_state()
    (one,) = group(24, 1, 4)
    list(one)
    assert torch.equal(torch.get_rng_state(), before)


def test_kinds_of_datasets_and_collation():
    batch = next(iter(loader([{"x": torch.tensor([i, i])} for i in range(4)], micro_batch_size=2, shuffle=False)))
    assert torch.equal(batch["x"], torch.tensor([[0, 0], [1, 1]]))
    x, y = next(iter(loader(TensorDataset(torch.arange(4), torch.arange(4) * 2), micro_batch_size=4)))
    assert torch.equal(x * 2, y)
    assert next(iter(loader(torch.arange(4.0), micro_batch_size=2, shuffle=False))).tolist() == [0.0, 1.0]
    assert next(iter(loader(["ab", "c"], micro_batch_size=2, shuffle=False, collate_fn="".join))) == "abc"

    class Many(Noisy):
        def __getitems__(self, indices):
            return [index * 10 for index in indices]

    assert next(iter(loader(Many(), micro_batch_size=2, shuffle=False))).tolist() == [0, 10]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Stream(), {}, ["Stream", "engine.track"]),
        (iter([1]), {}, ["list_iterator", "engine.track"]),
        ({"x": [1]}, {}, ["dict", "sample number"]),
        ("text", {}, ["str", "sample number"]),
        ([], {}, ["empty"]),
        ([1, 2], {"micro_batch_size": 3}, ["2 samples", "micro_batch_size 3", "drop_last=False"]),
        ([1], {"micro_batch_size": 0}, ["micro_batch_size = 0"]),
        ([1], {"micro_batch_size": 1.5}, ["micro_batch_size = 1.5"]),
        ([1], {"num_workers": -1}, ["num_workers = -1"]),
        ([1], {"epochs": 0}, ["epochs = 0"]),
        ([1], {"seed": "a"}, ["seed = 'a'"]),
        ([1], {"batch_size": 2}, ["batch_size", "micro_batch_size"]),
        ([1], {"shufle": True}, ["shufle", "'shuffle'"]),
        ([1], {"sampler": None}, ["sampler", "resumed"]),
        ([1], {"topology": 3}, ["topology = 3", "dp_rank"]),
        ([1], {"topology": SimpleNamespace(dp_rank=2, dp_size=2)}, ["dp_rank below dp_size"]),
    ],
)
def test_bad_input_is_named(dataset, options, words):
    with pytest.raises(PolyscaleError) as caught:
        loader(dataset, **options)
    assert all(word in str(caught.value) for word in words)
    assert caught.value.given and caught.value.why and caught.value.fix


def test_bad_states_are_named():
    (one,) = group(8, 1, 2)
    good = one.state_dict()
    for state, word in (
        ({}, "missing"),
        ({**good, "length": 9}, "9 samples"),
        ({**good, "position": 9}, "position 9"),
        ({**good, "epoch": -1}, "epoch = -1"),
        ({**good, "seed": None}, "seed = None"),
    ):
        with pytest.raises(PolyscaleError, match=word):
            one.load_state_dict(state)
    assert one.state_dict() == good


def test_the_package_exports_the_loader():
    assert isinstance(data.loader([1]), data.Loader)

"""PY05: the sampler has the indices of PyTorch's, goes on from a place, and is copied with it."""

import copy
import pickle

import numpy
import pytest
import torch

import shoal


def test_PY05_a_sampler_goes_on_from_a_place():
    for rank in (0, 1):
        sampler = shoal.data.DistributedSampler(list(range(8)), num_replicas=2, rank=rank, shuffle=False)
        sampler.seek(3)
        assert list(sampler) == [6 + rank] and len(sampler) == 1
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, sampler=sampler)
        sampler.seek(3)
        assert [len(loader) for _ in loader] == [1]
        sampler.set_epoch(1)
        assert list(sampler) == [rank, 2 + rank, 4 + rank, 6 + rank] and len(sampler) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_PY05_passes_after_that_of_seek_are_whole_without_set_epoch(workers):
    sampler = shoal.data.DistributedSampler(list(range(10)), num_replicas=2, rank=0, shuffle=False)
    loader = torch.utils.data.DataLoader(list(range(10)), batch_size=2, sampler=sampler, num_workers=workers)
    for _ in range(2):
        sampler.seek(3)
        assert next(iter(sampler)) == 6  # a look at the first is no pass
        assert [[len(batch) for batch in loader] for _ in range(3)] == [[2], [2, 2, 1], [2, 2, 1]]
        assert len(loader) == 3
    with pytest.raises(shoal.UsageError, match=r"seek\(min\(batches_done \* batch_size, 5\)\)"):
        sampler.seek(3 * 2)


def test_PY05_a_sampler_whose_options_are_set_later_has_the_indices_of_torchs():
    for size in (10, 11):
        ours, theirs = (
            kind(range(size), num_replicas=3, rank=1)
            for kind in (shoal.data.DistributedSampler, torch.utils.data.DistributedSampler)
        )
        for name, value in (("seed", 7), ("seed", -1), ("seed", numpy.int64(3)), ("shuffle", False)):
            setattr(ours, name, value)
            setattr(theirs, name, int(value))
            for epoch in range(2):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs), (name, value, epoch)
        ours.drop_last = True
        assert list(ours) == [1, 4, 7] and len(ours) == 3
        assert (ours.shuffle, ours.seed, ours.drop_last) == (False, 3, True)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_PY05_a_copy_of_a_sampler_is_at_the_same_place_and_goes_on_alone(duplicate):
    sampler = shoal.data.DistributedSampler(list(range(12)), num_replicas=2, rank=1, seed=5)
    sampler.set_epoch(2)
    sampler.seek(2)
    again = duplicate(sampler)
    assert list(again) == list(sampler) and len(again) == 4 and again.dataset == sampler.dataset
    again.set_epoch(3)
    again.shuffle = False
    assert sampler.epoch == 2 and sampler.shuffle and list(again) == [1, 3, 5, 7, 9, 11]


def test_PY05_wrong_numbers_of_a_sampler_are_named():
    def make(**arguments):
        return shoal.data.DistributedSampler(range(4), **{"num_replicas": 2, "rank": 0, **arguments})

    sampler = make()
    for text, call in {
        "rank is -1; give a whole number from 0": lambda: make(rank=-1),
        "seed is 1.5, a float; give a whole number": lambda: make(seed=1.5),
        "epoch is -1; give a whole number from 0": lambda: sampler.set_epoch(-1),
        "index is -1; give a whole number from 0": lambda: sampler.seek(-1),
        r"call set_epoch\(3\)": lambda: setattr(sampler, "epoch", 3),
        "num_replicas cannot be assigned to: make a sampler": lambda: setattr(sampler, "num_replicas", 4),
        "rank cannot be assigned to: make a sampler": lambda: setattr(sampler, "rank", 1),
    }.items():
        with pytest.raises(shoal.UsageError, match=text):
            call()
    sampler.set_epoch(numpy.int64(3))
    assert sampler.epoch == 3

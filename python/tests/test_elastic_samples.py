"""ELA05: what a loop says of the samples of its steps, beside what its loader draws from the sampler."""

import pytest
import torch
from torch.utils.data import DataLoader

import shoal
from elastic_loop import SAMPLES, X, Y, ddp, loss_of, make_net
from ranks import on_ranks

BATCH = 4


class Named(torch.utils.data.Dataset):
    """Samples of three keys, as Hugging Face's are."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"x": X[index], "y": Y[index], "index": index}


class Loop:
    def __init__(self, **options):
        self.model, self.optimizer = ddp(make_net())
        self.sampler = shoal.data.DistributedSampler(Named(), seed=1)
        self.elastic = shoal.Elastic(self.model, self.optimizer, self.sampler, **options)

    def loader(self, batch=BATCH, **options):
        return DataLoader(Named(), batch_size=batch, sampler=self.sampler, **options)

    def step(self, samples, *batches):
        def compute(begin=0, end=None):
            for batch in batches:
                loss_of(self.model(batch["x"][begin:end]), batch["y"][begin:end]).backward()

        assert self.elastic.step(samples, compute, self.optimizer.step)
        self.optimizer.zero_grad()

    def epoch(self, epoch, run):
        self.sampler.set_epoch(epoch)
        while self.elastic.in_epoch():
            run(self)


COUNTS = {"keys": len, "parts": lambda batch: len((batch["x"], batch["y"])), "more": lambda batch: 6}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("workers", [0, 1])
def test_ELA05_a_loop_that_counts_the_keys_of_a_batch_is_told_so(count, workers):
    def run(rank):
        loop = Loop()

        def count_keys(loop):
            for batch in loop.loader(num_workers=workers):
                loop.step(COUNTS[count](batch), batch)

        said = {"keys": 3, "parts": 2, "more": 6}[count]
        text = rf"step\(\) is given {said} samples for each batch, and the loader's batches have 4 of the sampler's.*len\(batch\['x'\]\)"
        with pytest.raises(shoal.UsageError, match=text):
            loop.epoch(0, count_keys)
        return loop.elastic.steps

    steps = on_ranks(run)
    assert steps == [1, 1] if workers == 0 else steps[0] == steps[1] <= SAMPLES // 2 // BATCH, steps


def every_batch(loop, **options):
    for batch in loop.loader(**options):
        loop.step(len(batch["x"]), batch)


def skipping(loop):
    for i, batch in enumerate(loop.loader()):
        if i % 2 == 0:
            loop.step(len(batch["x"]), batch)


def skipping_the_first(loop):
    for i, batch in enumerate(loop.loader()):
        if i % 2:
            loop.step(len(batch["x"]), batch)


def halves(loop):
    for batch in loop.loader():
        for part in (slice(0, 2), slice(2, 4)):
            loop.step(2, {name: values[part] for name, values in batch.items()})


def pairs(loop):
    batches = list(loop.loader())
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        loop.step(2 * BATCH, first, second)


def pairs_in_turn(loop):
    batches = iter(loop.loader())
    for batch in batches:
        loop.step(2 * BATCH, batch, next(batches))


def without_a_loader(loop):
    indices = iter(loop.sampler)
    for _ in range(8):
        batch = [Named()[next(indices)] for _ in range(3)]
        loop.step(3, {name: torch.stack([one[name] for one in batch]) for name in ("x", "y")})


RIGHT = {
    "every_batch": (every_batch, 6),
    "the_last_batch_is_smaller": (lambda loop: every_batch(loop, batch=5), 5),
    "the_last_batch_is_dropped": (lambda loop: every_batch(loop, batch=5, drop_last=True), 4),
    "one_batch": (lambda loop: every_batch(loop, batch=100), 1),
    "workers": (lambda loop: every_batch(loop, batch=5, num_workers=2), 5),
    "skipping": (skipping, 3),
    "skipping_the_first": (skipping_the_first, 3),
    "halves": (halves, 12),
    "pairs": (pairs, 3),
    "pairs_in_turn": (pairs_in_turn, 3),
    "without_a_loader": (without_a_loader, 8),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_ELA05_loops_that_count_samples_are_not_refused(kind):
    def run(rank):
        loop = Loop()
        for epoch in range(2):
            loop.epoch(epoch, RIGHT[kind][0])
        return loop.elastic.steps

    assert on_ranks(run) == [2 * RIGHT[kind][1]] * 2


def test_ELA05_shares_of_a_kept_global_batch_are_not_refused():
    def run(rank):
        loop = Loop(keep_global_batch=4 * BATCH, batch_slices=4)
        loop.epoch(0, lambda loop: every_batch(loop, batch=loop.elastic.batch_size))
        return loop.elastic.steps

    assert on_ranks(run) == [3, 3]

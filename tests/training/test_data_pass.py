"""One pass over batches: what is counted, and what a checkpoint has of it."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from persia_torchrec.training.data_pass import DataPass, has_position

BATCHES = [torch.full((2,), float(n)) for n in range(5)]


def train(one_pass, rest, num):
    for _ in range(num):
        one_pass.take(next(rest))
        one_pass.count(1)


def resumed(saved, batches, faults):
    one_pass = DataPass(batches, {})
    rest = one_pass.resume(saved, lambda: None, lambda *told: faults.append(told))
    return one_pass, [batch[0].item() for batch in rest]


def saved_after(num, batches=BATCHES):
    one_pass = DataPass(batches, {})
    train(one_pass, one_pass.begin(lambda: None), num)
    assert (one_pass.num_trained, one_pass.num_ahead) == (num, 0)
    of_data = {"num_batches": num, "own": {}, "last": {}}
    return {**of_data, "pass": one_pass.saved()}


def test_batches_that_are_trained_are_read_again_and_compared():
    faults = []
    one_pass, rest = resumed(saved_after(3), BATCHES, faults)
    assert rest == [3.0, 4.0]
    assert faults == []
    assert one_pass.how == ", of which 3 were read again and are the same"


def test_other_batches_than_those_that_are_trained_are_told_of():
    faults = []
    resumed(saved_after(3), BATCHES[::-1], faults)
    resumed(saved_after(3), [*BATCHES[:2], BATCHES[4]], faults)
    resumed(saved_after(3), BATCHES[:2], faults)
    assert faults == [
        ("list", "another first batch"),
        ("list", "another batch 2"),
        ("list", "2 batches, of which 3 are trained"),
    ]


def test_batches_that_are_handed_out_and_not_trained_are_ahead():
    one_pass = DataPass(BATCHES, {})
    rest = one_pass.begin(lambda: None)
    for _ in range(3):
        one_pass.take(next(rest))
    one_pass.count(1)
    assert one_pass.num_ahead == 2


def test_random_numbers_are_noted_before_the_loader_draws_some():
    torch.manual_seed(3)
    before, noted = torch.get_rng_state(), []
    loader = DataLoader(TensorDataset(torch.arange(6)), shuffle=True)
    one_pass = DataPass(loader, {})
    one_pass.begin(lambda: noted.append(torch.get_rng_state()))
    assert torch.equal(noted[0], before)
    assert not torch.equal(torch.get_rng_state(), before)
    assert one_pass.unsaved == []


def test_a_generator_that_is_in_no_state_is_told_of():
    data, own = TensorDataset(torch.arange(6)), torch.Generator()
    loader = DataLoader(data, shuffle=True, generator=own)
    assert DataPass(loader, {}).unsaved == ["DataLoader"]
    assert DataPass(loader, {}, generators=[own]).unsaved == []


def test_what_has_a_position_is_told_from_a_model():
    class Stream:
        def __iter__(self):
            return iter([])

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    assert has_position(Stream())
    assert not has_position(torch.nn.ModuleList())
    assert not has_position([1, 2])

"""Mixed precision scales the loss, and what is not finite is named."""

import numpy as np
import pytest
import torch
from torch import nn

from persia_torchrec.ctx import eval_ctx
from persia_torchrec.data import DataLoader
from persia_torchrec.device.transfer import ToHost
from persia_torchrec.persia.batch import NonIDTypeFeature
from persia_torchrec.persia.ctx import train_ctx
from persia_torchrec.persia.ctx.train_ctx import NonFiniteWatch
from tests.support.local_job import Batches, SumOfEmbeddings, batch_of

pytestmark = pytest.mark.slow

MANY = 99_999.0  # more than float16 holds


class Dense(nn.Module):
    """A layer over a feature and the embeddings; notes how it is run."""

    def __init__(self):
        super().__init__()
        self.over = nn.Linear(5, 1)
        self.factor = 1.0
        self.autocasts = []

    def forward(self, non_id_tensors, embeddings):
        self.autocasts.append(torch.is_autocast_enabled("cpu"))
        inputs = torch.cat([*non_id_tensors, *embeddings], dim=1)
        return self.over(inputs) * self.factor


class Overflowing(SumOfEmbeddings):
    """Gradients of its embeddings overflow in steps that a test names."""

    overflows = False

    def forward(self, non_id_tensors, embeddings):
        output = super().forward(non_id_tensors, embeddings)
        if self.overflows:
            embeddings[0].register_hook(lambda grad: grad * torch.inf)
        return output


def batch(feature=1.0, **more):
    features = [NonIDTypeFeature(np.full((1, 1), feature, dtype=np.float32), "gain")]
    return batch_of([1], non_id_type_features=features, **more)


def scaled(ctx, **settings):
    """Give a context on the CPU what ``mixed_precision`` gives it on a GPU."""
    ctx._scaler = torch.amp.GradScaler("cpu", **settings)
    return ctx._scaler


def steps(ctx, num, factors=()):
    """Take steps whose losses have these factors, and 1; yield after each."""
    for number, data in enumerate(DataLoader(Batches([batch()] * num))):
        factor = factors[number] if number < len(factors) else 1.0
        output, _ = ctx.forward(data)
        yield ctx.backward(output.sum() * factor)


class TestAutocast:
    def test_mixed_precision_runs_the_model_in_its_own_precision(self, job):
        with job.train_ctx(Dense(), lr=0.0) as ctx:
            scaled(ctx)
            for data in DataLoader(Batches([batch(MANY)])):
                output, _ = ctx.forward(data)
                assert output.dtype == torch.float32
                assert output.isfinite().all()
                ctx.backward(output.sum())
            assert ctx.model.autocasts == [False]

    @pytest.mark.parametrize("is_scaled", [True, False])
    def test_an_autocast_of_the_caller_holds(self, job, is_scaled):
        with job.train_ctx(Dense()) as ctx:
            if is_scaled:
                scaled(ctx)
            for data in DataLoader(Batches([batch()] * 2)):
                with torch.autocast("cpu", torch.bfloat16):
                    output, _ = ctx.forward(data)
                assert output.dtype == torch.bfloat16  # as the model gives it
                ctx.backward(output.float().sum())
            with (
                eval_ctx() as evaluation,
                torch.autocast("cpu", torch.bfloat16),
            ):
                loader = DataLoader(Batches([batch(requires_grad=False)]))
                outputs = [evaluation.forward(data)[0] for data in loader]
            assert ctx.model.autocasts == [True] * 3
            assert outputs[0].dtype == torch.bfloat16


class TestLossScale:
    @pytest.mark.slow
    def test_it_has_a_floor_and_a_line_after_20_steps(self, job, caplog):
        """Divided by 4 in each of 100 steps it would be 0, too small to divide by."""
        with job.train_ctx(Dense()) as ctx:
            scaler, scales = scaled(ctx), []
            step = ctx.embeddings.backward
            ctx.embeddings.backward = lambda loss, scale: (
                scales.append(scale.item()),
                step(loss, scale),
            )[1]
            weight = ctx.model.over.weight.detach().clone()
            losses = list(steps(ctx, 100, [float("nan")] * 99))
            assert torch.isnan(losses[-2])
            assert min(scales) == scales[-1] == 1.0
            assert not torch.equal(ctx.model.over.weight, weight)  # by the last step
            assert scaler.get_scale() == 1.0
        lines = [r.message for r in caplog.records if "no row was updated" in r.message]
        assert len(lines) == 1
        assert "not finite in 20 backward passes in a row" in lines[0]

    def test_a_scale_of_0_in_a_checkpoint_is_raised_to_the_floor(self, job):
        with job.train_ctx(Dense()) as ctx:
            scaler = scaled(ctx)
            scaler.load_state_dict({**scaler.state_dict(), "scale": 0.0})
            assert [loss.item() != 0 for loss in steps(ctx, 1)] == [True]
            assert scaler.get_scale() == 1.0

    def test_it_is_not_read_in_a_step(self, job, monkeypatch):
        def read(_):
            raise AssertionError("a GPU would be waited for")

        monkeypatch.setattr(torch.amp.GradScaler, "get_scale", read)
        with job.train_ctx(Dense()) as ctx:
            scaled(ctx)
            assert len(list(steps(ctx, 3, [1.0, float("nan")]))) == 3

    @pytest.mark.parametrize("is_dense_finite", [True, False])
    def test_it_grows_when_enough_steps_were_good_in_a_row(self, job, is_dense_finite):
        """As torch's own: a step that is left out begins the count again."""
        with job.train_ctx(Overflowing()) as ctx:
            scaler = scaled(ctx, init_scale=1024.0, growth_interval=3)
            scales = []
            for number, data in enumerate(DataLoader(Batches([batch_of([1])] * 7))):
                ctx.model.overflows = number == 2
                output, _ = ctx.forward(data)
                dense = torch.inf if number == 2 and not is_dense_finite else 1.0
                ctx.backward(output.sum() * dense)
                scales.append(scaler.get_scale())
            # PERSIA's factor of 4, whose count of 3 is begun by the step after.
            assert scales == [1024.0, 1024.0, 256.0, 256.0, 256.0, 512.0, 512.0]
            assert scaler.get_backoff_factor() == 0.5


def warnings_of(caplog):
    return [r.message for r in caplog.records if r.name == train_ctx.__name__]


class TestWhatIsNotFinite:
    def test_the_step_and_the_loss_are_named_once_per_run(self, job, caplog):
        nan = float("nan")
        with job.train_ctx(Dense()) as ctx:
            scaled(ctx)  # so that the weights stay
            list(steps(ctx, 8, [1.0, nan, torch.inf, nan, 1.0, 1.0, nan]))
        first, second = warnings_of(caplog)
        assert first.startswith("the loss of step 2 is not finite")
        assert second.startswith("the loss of step 7 is not finite")

    def test_an_output_is_named_before_the_loss_that_it_spoils(self, job, caplog):
        with job.train_ctx(Dense()) as ctx:
            ctx.model.factor = float("inf")
            for data in DataLoader(Batches([batch()] * 2)):
                output, _ = ctx.forward(data)
                (line,) = warnings_of(caplog)
                ctx.backward(output.sum())
        assert line.startswith("the output of step 1 is not finite")
        assert warnings_of(caplog) == [line]

    def test_a_copy_that_is_late_is_told_of_by_a_later_call(self, monkeypatch, caplog):
        are_here = [False]
        monkeypatch.setattr(ToHost, "is_here", lambda _: are_here[0])
        watch = NonFiniteWatch()
        watch.note(1, "output", torch.ones(2))
        watch.note(1, "loss", torch.tensor(float("nan")))
        assert warnings_of(caplog) == []
        are_here[0] = True
        watch.note(2, "output", torch.ones(2))
        (line,) = warnings_of(caplog)
        assert line.startswith("the loss of step 1 is")

    def test_the_end_of_a_block_reports_what_is_there(self, job, monkeypatch, caplog):
        """As where a loss function's own assertion ends the work of the GPU."""
        monkeypatch.setattr(ToHost, "is_here", lambda _: False)

        def train():
            with job.train_ctx(Dense()) as ctx:
                ctx.model.factor = float("inf")
                (data,) = DataLoader(Batches([batch()]))
                output, _ = ctx.forward(data)
                nn.functional.binary_cross_entropy(output, torch.ones(1, 1))

        with pytest.raises(RuntimeError, match="between 0 and 1"):
            train()
        (line,) = warnings_of(caplog)
        assert line.startswith("the output of step 1 is")

    def test_copies_that_never_come_are_bounded(self, monkeypatch):
        monkeypatch.setattr(ToHost, "is_here", lambda _: False)
        watch = NonFiniteWatch()
        for step in range(1000):
            watch.note(step, "loss", torch.ones(()))
        assert len(watch._pending) == 256

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_all_tensors_of_an_output_count(self, dtype, caplog):
        good = torch.full((3,), 100.0, dtype=dtype)
        largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
        bad = torch.tensor([1.0, -torch.inf], dtype=dtype)
        watch = NonFiniteWatch()
        fine = [good, {"a": largest}, torch.ones(2, dtype=torch.int64), None]
        watch.note(1, "output", fine)
        watch.note(2, "output", torch.zeros(0, 3, dtype=dtype))
        assert warnings_of(caplog) == []
        watch.note(3, "output", (good, {"a": [good, bad]}))
        (line,) = warnings_of(caplog)
        assert line.startswith("the output of step 3")

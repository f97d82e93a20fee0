import time, threading
import numpy as np, pytest, torch
from torch import nn
from persia_torchrec.ctx import TrainCtx, DataCtx, eval_ctx
from persia_torchrec.data import DataLoader, IterableDataset, StreamingDataset
from persia_torchrec.embedding.data import *
from tests.local_job import *
from tests.servers import ids_of

class Listed(IterableDataset):
    def __init__(self, batches, buffer_size=10):
        super().__init__(buffer_size); self.b = batches
    def __iter__(self):
        yield from self.b

@pytest.fixture
def job(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch) as job:
        yield job

def test_train(job):
    with job.train_ctx() as ctx:
        for batch in DataLoader(Listed([batch_of([1,2],[2],[]) for _ in range(5)])):
            out, labels = ctx.forward(batch)
            assert out.shape == (3,1)
            ctx.backward(out.sum())
    print(job.read("item",1,2,3), job.num_rows())

def test_break_before_backward(job):
    t = time.monotonic()
    with job.train_ctx() as ctx:
        for i, batch in enumerate(DataLoader(Listed([batch_of([1,2],[2],[]) for _ in range(50)]))):
            if i == 3: break
            out, labels = ctx.forward(batch)
            ctx.backward(out.sum())
    assert time.monotonic() - t < 10

def test_break_while_stalled(job):
    t = time.monotonic()
    go = threading.Event()
    class Stalls(IterableDataset):
        def __iter__(self):
            yield from [batch_of([1,2],[2],[]) for _ in range(5)]
            go.wait(60)
    with job.train_ctx() as ctx:
        for i, batch in enumerate(DataLoader(Stalls())):
            out, labels = ctx.forward(batch)
            ctx.backward(out.sum())
            if i == 2: break
        ctx.clear_embeddings()
    assert time.monotonic() - t < 10
    go.set()

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4,1) for _ in range(3)])
        self.n = 0
    def forward(self, non, emb):
        self.n += 1
        return self.heads[self.n % 2](emb[0])

def test_unused(job):
    m = Heads()
    with job.train_ctx(m) as ctx:
        for i, batch in enumerate(DataLoader(Listed([batch_of([1,2],[2],[]) for _ in range(6)]))):
            out, labels = ctx.forward(batch)
            ctx.backward(out.sum())
            print([h.weight.sum().item() for h in m.heads])

def test_unknown_feature_iterable(job):
    with job.train_ctx() as ctx:
        b = PersiaBatch([IDTypeFeature("item",[ids_of(1)]), IDTypeFeature("itme",[ids_of(1)])], labels=[Label(np.zeros((1,1),dtype=np.float32))])
        with pytest.raises(Exception) as e:
            for batch in DataLoader(Listed([b])):
                out, labels = ctx.forward(batch)
        print(e)

def test_accumulate(job):
    with job.train_ctx() as ctx:
        pend = []
        for i, batch in enumerate(DataLoader(Listed([batch_of([1,2],[2],[]) for _ in range(6)]), embedding_staleness=4)):
            pend.append(ctx.forward(batch)[0])
            if len(pend) == 2:
                ctx.backward(sum(p.sum() for p in pend)); pend=[]
    print(job.read("item",1,2))

"""What a server must hold and answer, by the requests that have reached it."""

from collections import Counter, defaultdict

import numpy as np

from persia_torchrec.server.dedup import NOTHING, NUM_OUTCOMES, WINDOW

REJECTED = None
"""The outcome of an update that failed: sent again, it fails again."""


class Model:
    """Two tables of one weight a row, of which ``RARE`` admits an id at its second use.

    A batch is a stream and a number; gradients are by id, of ``COUNT``. A share is of a
    step, which is applied when each of ``NUM_RANKS`` has given its own or has left.
    """

    COUNT, RARE = range(2)
    NUM_RANKS = 2

    def __init__(self):
        self.rows, self.sighted = {}, set()  # by table and id: weight, lookups
        self.num_steps = self.num_repeated = 0
        self.highest = defaultdict(lambda: -1)  # of each stream
        self.open, self.looked_up = set(), set()
        self.settled, self.latest = {}, {}  # outcomes; the number that has a slot
        self.waiting, self.left = defaultdict(dict), {}
        self.needs_no_update = set()  # streams with lookups of rows with state

    def is_old(self, batch):
        return batch[1] <= self.highest[batch[0]] - WINDOW

    def is_repeated(self, batch, *, is_marked=False):
        stream, number = batch
        self.highest[stream] = max(number, self.highest[stream])
        is_repeated = self.is_old(batch) or is_marked or batch in self.settled
        self.num_repeated += is_repeated
        return is_repeated

    def look_up_states(self, batch, part, table, ids):
        """Return what a lookup with state reads: rows, ids that wait, lookups.

        Ids that a repeated lookup names for the first time do not wait.
        """
        weights = self.look_up(batch, part, table, ids, with_state=True)
        rows = [self.rows.get((table, id_)) for id_ in ids]
        waits = [(table, id_) in self.sighted for id_ in ids]
        without = [n for n, row in enumerate(rows) if waits[n] and not row]
        seen = [row[1] if row else 0 for row in rows] if table == self.COUNT else []
        return weights, without, seen

    def look_up(self, batch, part, table, ids, *, with_state=False):
        """Return the weights that a training lookup reads."""
        is_marked = (batch, part) in self.looked_up
        if not self.is_repeated(batch, is_marked=is_marked):
            self.looked_up.add((batch, part))
            if with_state:
                self.needs_no_update.add(batch[0])
            else:
                self.open.add(batch)
            for key in [(table, id_) for id_ in ids]:
                if table == self.RARE and key not in self.sighted:
                    self.sighted.add(key)
                else:
                    weight, num_lookups = self.rows.get(key, (0.0, 0))
                    self.rows[key] = weight, num_lookups + 1
        return [self.rows.get((table, id_), (0.0, 0))[0] for id_ in ids]

    def change(self, batch, apply):
        """Apply what a request changes, once; return its outcome."""
        if self.is_repeated(batch):
            return self.recall(batch)
        return self.settle(batch, apply())

    def recall(self, batch):
        stream, number = batch
        is_kept = self.latest.get((stream, number % NUM_OUTCOMES)) == number
        return self.settled[batch] if is_kept else NOTHING

    def settle(self, batch, outcome):
        stream, number = batch
        self.settled[batch] = outcome
        self.latest[stream, number % NUM_OUTCOMES] = number
        self.open.discard(batch)
        return outcome

    def update(self, *gradients):
        """Apply the sum of gradients as one step; return what it did with them."""
        total = Counter()
        for each in gradients:
            for id_, value in each.items():
                total[id_] += value
        self.num_steps += any(gradients)
        known = [id_ for id_ in total if (self.COUNT, id_) in self.rows]
        finite = [id_ for id_ in known if np.isfinite(total[id_])]
        for key in [(self.COUNT, id_) for id_ in finite]:
            self.rows[key] = self.rows[key][0] - total[key[1]], self.rows[key][1]
        return len(total) - len(known), len(known) - len(finite), 0, len(total)

    def write(self, id_, weight):
        _, num_lookups = self.rows.get((self.COUNT, id_), (0.0, 0))
        self.rows[self.COUNT, id_] = weight, num_lookups + 1
        return NOTHING

    def write_states(self, id_, weight, count, num_before, step):
        _, num_lookups = self.rows.get((self.COUNT, id_), (0.0, 0))
        num_lookups = max(num_lookups, num_before) + count
        self.rows[self.COUNT, id_] = weight, num_lookups
        self.num_steps = max(self.num_steps, step)
        return NOTHING

    def set_step(self, num_steps):
        self.num_steps = num_steps
        return num_steps, 0, 0, 0

    def clear(self):
        self.rows, self.sighted, self.num_steps = {}, set(), 0
        return NOTHING

    def share(self, batch, rank, step, gradients):
        """Take a share; return the outcomes of the batches that it settles."""
        if self.is_repeated(batch):
            return {batch: self.recall(batch)}
        if self.left.get(rank, step + 1) <= step:
            return {batch: self.settle(batch, REJECTED)}
        self.waiting[step][rank] = batch, gradients
        return self.complete(step)

    def complete(self, step):
        given = self.waiting[step]
        missing = {rank for rank in range(self.NUM_RANKS) if rank not in given}
        if not given or any(self.left.get(rank, step + 1) > step for rank in missing):
            return {}
        outcome = self.update(*(gradients for _, gradients in given.values()))
        for batch, _ in self.waiting.pop(step).values():
            self.settle(batch, outcome)
        return {batch: outcome for batch, _ in given.values()}

    def leave(self, rank, step):
        self.left[rank] = step
        done = [self.complete(number) for number in sorted(self.waiting)]
        return {batch: outcome for each in done for batch, outcome in each.items()}

    def end_group(self):
        """Forget the group; return what becomes of the shares that wait."""
        ended = [
            batch for given in self.waiting.values() for batch, _ in given.values()
        ]
        self.waiting.clear()
        self.left.clear()
        for batch in ended:
            self.settle(batch, REJECTED)
        return dict.fromkeys(ended, REJECTED)

    def restart(self):
        """Lose what waits, and what is counted by each process."""
        self.waiting.clear()
        self.num_repeated = 0
        self.open = {
            batch
            for batch in self.open
            if not self.is_old(batch) and batch[0] not in self.needs_no_update
        }

"""Slow and obvious models that the fast code is compared with.

Python's integers and dictionaries, and NumPy in double precision, one row at a time;
nothing here is shared with the code under test but the descriptions of tables.

Dimension key:
    N: ids of one request
    D: embedding dim
    B: bags
    L: ids in all bags
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from persia_torchrec import (
    AdmitFrequency,
    AdmitProbability,
    Constant,
    InverseSqrtDim,
    Normal,
    TruncatedNormal,
    Uniform,
)
from persia_torchrec.arrays import Doubles
from persia_torchrec.embedding.initializer import Quantiles
from persia_torchrec.embedding.optim import (
    FTRL,
    LAMB,
    LARS,
    SGD,
    Adagrad,
    AdagradDecay,
    Adam,
    AdamAsync,
    AdamW,
    Optimizer,
    RowwiseAdam,
    RowwiseLAMB,
)
from persia_torchrec.embedding.setting import Initializer

if TYPE_CHECKING:
    from persia_torchrec.table import TableSpec


def rotate_right(word: int, bits: int) -> int:
    return ((word >> bits) | (word << (64 - bits))) % 2**64


def farmhash64(id_: int) -> int:
    """Hash the eight bytes of an id: FarmHash's Fingerprint64."""
    k2 = 0x9AE16A3B2F90404F
    mul = (k2 + 16) % 2**64
    a = (id_ + k2) % 2**64
    c = (rotate_right(id_, 37) * mul + a) % 2**64
    d = ((rotate_right(a, 25) + id_) * mul) % 2**64
    t = ((c ^ d) * mul) % 2**64
    t ^= t >> 47
    t = ((d ^ t) * mul) % 2**64
    t ^= t >> 47
    return t * mul % 2**64


def hash_stack(id_: int, rounds: int, size: int) -> list[int]:
    """Return the buckets of an id, one a round."""
    buckets = []
    for r in range(1, rounds + 1):
        id_ = farmhash64(id_)
        buckets.append(id_ % size + (r - 1) * size)
    return buckets


def random_words(seed: int) -> Iterator[int]:
    """Draw 64-bit numbers as PERSIA does: PCG32 seeds xoshiro256++."""
    state = seed
    halves = []
    for _ in range(8):
        state = (state * 6364136223846793005 + 11634580027462260723) % 2**64
        word = (((state >> 18) ^ state) >> 27) % 2**32
        rotation = state >> 59
        halves.append((word >> rotation | word << (32 - rotation)) % 2**32)
    s = [low | high << 32 for low, high in zip(halves[::2], halves[1::2], strict=True)]
    while True:
        yield (rotate_right((s[0] + s[3]) % 2**64, 41) + s[0]) % 2**64
        shifted = s[1] << 17
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted % 2**64
        s[3] = rotate_right(s[3], 19)


def uniform_weights(
    seed: int, dim: int, lower: float, upper: float
) -> npt.NDArray[np.float32]:
    """Draw ``dim`` weights to the last bit."""
    lower_, upper_ = np.float32(lower), np.float32(upper)
    units = [np.float32((word >> 41) / 2**23) for word in first(dim, seed)]
    return np.array([unit * (upper_ - lower_) + lower_ for unit in units], np.float32)


def first(num: int, seed: int) -> list[int]:
    return list(itertools.islice(random_words(seed), num))


def initial_weights(
    initializer: Initializer, seed: int, dim: int
) -> npt.NDArray[np.float32]:
    """Draw ``dim`` weights: uniform ones to the last bit, others almost."""
    units = ((word // 2**12 + 0.5) / 2**52 for word in random_words(seed))
    normal = NormalDist()
    match initializer:
        case Uniform(lower, upper):
            return uniform_weights(seed, dim, lower, upper)
        case InverseSqrtDim():
            return uniform_weights(seed, dim, -(dim**-0.5), dim**-0.5)
        case Constant(value):
            weights = [value] * dim
        case Normal(mean, std):
            weights = [mean + std * normal.inv_cdf(next(units)) for _ in range(dim)]
        case TruncatedNormal(mean, std, bound):
            low, high = normal.cdf(-bound), normal.cdf(bound)
            shares = [low + (high - low) * next(units) for _ in range(dim)]
            weights = [mean + std * normal.inv_cdf(share) for share in shares]
        case Quantiles(values, is_discrete, counts):
            num = len(values) if is_discrete else len(values) - 1
            counts = counts or (1,) * num
            weights = []
            for place in (next(units) * sum(counts) for _ in range(dim)):
                ends = np.cumsum(counts)
                at = int(np.argmax(place < ends))
                fraction = 1 - (ends[at] - place) / counts[at]
                weights.append(
                    values[at]
                    if is_discrete
                    else values[at] + fraction * (values[at + 1] - values[at])
                )
    return np.array(weights, np.float32)


@dataclass
class Row:
    """Weights and optimizer state of one id, in double precision."""

    weights: Doubles
    state: Doubles
    frequency: int = 0
    frequency_class: int = 0
    first_step: int = 0
    last_step: int = 0
    last_s: int = 0

    def floats(self) -> Doubles:
        return np.concatenate([self.weights, self.state])


def step(optimizer: Optimizer, row: Row, grad: Doubles, t: int) -> None:
    """Apply one gradient to one row, by the formula in the optimizer's docstring."""
    w = row.weights
    match optimizer:
        case SGD(lr, momentum, wd):
            g = grad + wd * w
            if momentum:
                row.state[:] = g = momentum * row.state + g
            w -= lr * g
        case Adagrad(lr, _, wd, kept, eps, shared):
            g = grad + wd * w
            row.state[:] = kept * row.state + (np.mean(g * g) if shared else g * g)
            w -= lr * g / (np.sqrt(row.state) + eps)
        case AdagradDecay(lr):
            step_adagrad_decay(optimizer, row, grad, t)
        case LARS(lr):
            wd, length = optimizer.weight_decay, np.linalg.norm(w)
            denominator = np.linalg.norm(grad) + wd * length
            is_zero = length == 0 or denominator == 0
            ratio = 1 if is_zero else optimizer.eta * length / denominator
            b = lr * ratio * (grad + wd * w)
            if optimizer.momentum:
                row.state[:] = b = optimizer.momentum * row.state + b
            w -= b
        case FTRL():
            step_ftrl(optimizer, row, grad)
        case AdamAsync():
            step_adam_async(optimizer, row, grad, t)
        case Adam() | AdamW() | RowwiseAdam() | LAMB() | RowwiseLAMB():
            step_adam(optimizer, row, grad, t)
        case _:
            raise NotImplementedError(optimizer)


def step_adagrad_decay(optimizer: AdagradDecay, row: Row, g: Doubles, t: int) -> None:
    """Shrink the accumulator once for every boundary that was passed, then step."""
    a = row.state[:-1]
    while row.state[-1] < t // optimizer.decay_step:
        row.state[-1] += 1
        for d in range(len(a)):
            a[d] = max(a[d] * optimizer.decay_rate, optimizer.initial_accumulator_value)
    a += g * g
    row.weights -= optimizer.lr * g / np.sqrt(a)


def step_ftrl(optimizer: FTRL, row: Row, grad: Doubles) -> None:
    """Take one weight after the other, by the cases of the formula."""
    lr, p, l1 = optimizer.lr, -optimizer.lr_power, optimizer.l1
    w, (n, z) = row.weights, row.state.reshape(2, -1)
    for d, g in enumerate(grad):
        sigma = ((n[d] + g * g) ** p - n[d] ** p) / lr
        z[d] += g - sigma * w[d]
        n[d] += g * g
        if abs(z[d]) <= l1:
            w[d] = 0
        else:
            curvature = (optimizer.beta + n[d] ** p) / lr + 2 * optimizer.l2
            w[d] = (np.sign(z[d]) * l1 - z[d]) / curvature


def step_adam(
    optimizer: Adam | AdamW | RowwiseAdam | LAMB | RowwiseLAMB,
    row: Row,
    g: Doubles,
    t: int,
) -> None:
    """Update both means, correct them, and move by their quotient."""
    (beta1, beta2), wd, lr = optimizer.betas, optimizer.weight_decay, optimizer.lr
    w, dim = row.weights, len(row.weights)
    m, v = row.state[:dim], row.state[dim:]
    if optimizer.kind == "adam":
        g = g + wd * w
    squares = np.mean(g * g) if optimizer.kind.startswith("rowwise") else g * g
    m[:] = beta1 * m + (1 - beta1) * g
    v[:] = beta2 * v + (1 - beta2) * squares
    u = m / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + optimizer.eps)
    match optimizer.kind:
        case "adam":
            w -= lr * u
        case "adamw" | "rowwise_adam":
            w *= 1 - lr * wd
            w -= lr * u
        case "lamb" | "rowwise_lamb":
            u += wd * w
            lengths = np.linalg.norm(w), np.linalg.norm(u)
            w -= lr * (lengths[0] / lengths[1] if all(lengths) else 1) * u


def step_adam_async(optimizer: AdamAsync, row: Row, g: Doubles, t: int) -> None:
    """Step as Adam with its other eps, or as RMSProp with momentum."""
    (beta1, beta2), lr, eps = optimizer.betas, optimizer.lr, optimizer.eps
    m, v = row.state.reshape(2, -1)
    v[:] = beta2 * v + (1 - beta2) * g * g
    if optimizer.apply_sparse_rmsprop:
        m[:] = beta1 * m + lr * g / np.sqrt(v + eps)
        row.weights -= m
        return
    m[:] = beta1 * m + (1 - beta1) * g
    u = beta1 * m + (1 - beta1) * g if optimizer.use_nesterov else m
    alpha = lr * np.sqrt(1 - beta2**t) / (1 - beta1**t)
    row.weights -= alpha * u / (np.sqrt(v) + eps)


class ReferenceStore:
    """The embedding store as one dictionary, least recently used first.

    A training lookup uses the rows that are there, each once, then makes the others.
    """

    def __init__(self, capacity_rows: int, eviction: str = "lru") -> None:
        self.capacity_rows = capacity_rows
        self.eviction = eviction
        self.now_s = 0
        self.tables: list[TableSpec] = []
        self.rows: OrderedDict[tuple[int, int], Row] = OrderedDict()
        self.shared: dict[tuple[int, int], Row] = {}
        self.counts: Counter[str] = Counter()
        self.num_updates: Counter[int] = Counter()
        self.seen: Counter[tuple[int, int]] = Counter()
        self.waited: dict[tuple[int, int], int] = {}

    def lookup(
        self,
        table: int,
        ids: Sequence[int],
        *,
        training: bool,
        counts: Sequence[int] | None = None,
        admits_all: bool = False,
        batch: int = 0,
    ) -> Doubles:
        self.batch = batch
        spec = self.tables[table]
        counts = [1] * len(ids) if counts is None else counts
        out = np.full((len(ids), spec.dim), spec.admission.unadmitted_value)
        known = [(table, id_) in self.rows for id_ in ids]
        self.counts["hits"] += sum(known)
        self.counts["misses"] += len(ids) - sum(known)
        places = range(len(ids))
        used = set()
        for n in (n for n in places if training and known[n]):
            self._count(table, ids[n], counts[n], is_first=ids[n] not in used)
            used.add(ids[n])
        for n in (n for n in places if known[n]):
            out[n] = self.rows[table, ids[n]].weights
        missing = [n for n in places if training and not known[n]]
        admitted, waited = [], {}  # and how often the id had been seen before
        for n in missing:
            before = [m for m in admitted if ids[m] == ids[n]]
            if admits_all or before or self._admits(table, ids[n], counts[n]):
                admitted.append(n)
                if before and not admits_all:
                    waited[n] = waited[before[-1]] + counts[before[-1]]
                else:
                    waited[n] = self.waited.pop((table, ids[n]), 0)
        self.counts["rejected"] += len(missing) - len(admitted)
        if spec.shared_rows and not admits_all:
            self._make_shared(table, {ids[n] for n in missing if n not in admitted})
            for n in (n for n in places if not known[n]):
                out[n] = self._shared_weights(table, ids[n])
        for n in admitted:
            is_first = (table, ids[n]) not in self.rows
            if is_first:
                shared = None if admits_all else out[n]
                self._begin_row(table, ids[n], waited[n], shared)
            self._count(table, ids[n], counts[n], is_first=is_first)
            out[n] = self.rows[table, ids[n]].weights
        return out

    def _begin_row(
        self, table: int, id_: int, waited: int, shared: Doubles | None
    ) -> None:
        spec = self.tables[table]
        self.rows[table, id_] = row = self._make(table, id_)
        if spec.shared_rows and shared is not None:
            row.weights[:] = shared
        if isinstance(spec.admission, AdmitFrequency):
            row.frequency = waited

    def update(self, table: int, ids: Sequence[int], grads_ND: Doubles) -> int:
        spec = self.tables[table]
        self.num_updates[table] += 1
        num_missed = 0
        sums: dict[int, Doubles] = {}  # of the gradients of a shared row
        for id_, grad in zip(ids, grads_ND, strict=True):
            key = id_ % spec.shared_rows if spec.shared_rows else None
            has_row = (table, id_) in self.rows
            if not has_row and (table, key) not in self.shared:
                num_missed += 1
            elif not np.isfinite(grad).all():
                self.counts["gradients_refused"] += 1
            elif has_row:
                self._step(table, self.rows[table, id_], grad)
            else:
                sums[key] = sums.get(key, 0) + grad
        for key, grad in sums.items():
            self._step(table, self.shared[table, key], grad)
        self.counts["gradients_missed"] += num_missed
        return num_missed

    def _step(self, table: int, row: Row, grad: Doubles) -> None:
        spec, t = self.tables[table], self.num_updates[table]
        step(spec.optimizer, row, grad, t)
        if spec.weight_bound:
            row.weights.clip(-spec.weight_bound, spec.weight_bound, row.weights)
        row.last_step, row.last_s = t, self.now_s

    def _make_shared(self, table: int, ids: set[int]) -> None:
        num = self.tables[table].shared_rows
        for key in sorted({id_ % num for id_ in ids}):
            if (table, key) not in self.shared:
                self.shared[table, key] = self._make(table, key)

    def _shared_weights(self, table: int, id_: int) -> Doubles:
        """Return the weights of an id's shared row, made or not."""
        spec = self.tables[table]
        key = id_ % spec.shared_rows
        if (table, key) in self.shared:
            return self.shared[table, key].weights
        return initial_weights(spec.initializer, key ^ spec.seed, spec.dim)

    def write(self, table: int, ids: Sequence[int], weights_ND: Doubles) -> None:
        self.lookup(table, ids, training=True, admits_all=True)
        for id_, weights in zip(ids, weights_ND, strict=True):
            if (table, id_) in self.rows:  # else it left for another one
                self.rows[table, id_].weights[:] = weights

    def write_several(
        self,
        tables: Sequence[int],
        ids: Sequence[Sequence[int]],
        rows: Sequence[Doubles],
        counts: Sequence[Sequence[int]] | None = None,
        frequencies: Sequence[Sequence[int]] | None = None,
        steps: Sequence[int] | None = None,
    ) -> None:
        """Write rows with state, of which none leaves for another one of the call."""
        used: set[tuple[int, int]] = set()
        for table, step in zip(tables, steps or (), strict=bool(steps)):
            self.num_updates[table] = max(self.num_updates[table], step)
        for t, table in enumerate(tables):
            places = range(len(ids[t]))
            known = [n for n in places if (table, ids[t][n]) in self.rows]
            for n in [*known, *(n for n in places if n not in known)]:
                key = table, ids[t][n]
                if key not in self.rows and not self._make_written(key, used):
                    continue
                row = self.rows[key]
                row.weights[:], row.state[:] = np.split(rows[t][n], [len(row.weights)])
                if frequencies is not None:
                    row.frequency = max(row.frequency, frequencies[t][n])
                count = 1 if counts is None else counts[t][n]
                self._count(*key, count, is_first=key not in used)
                used.add(key)
                if steps is not None:
                    row.last_step, row.last_s = self.num_updates[table], self.now_s

    def _make_written(self, key: tuple[int, int], used: set[tuple[int, int]]) -> bool:
        """Make a row, maybe in place of one that was not used; return whether it is."""
        is_full = len(self.rows) + len(self.shared) >= self.capacity_rows
        others = [other for other in self.next_to_leave() if other not in used]
        if is_full and not others:
            self.counts["writes_without_room"] += 1
            return False
        if is_full:
            del self.rows[others[0]]
            self.counts["evictions"] += 1
        self.rows[key] = self._make(*key)
        return True

    def read(self, table: int, ids: Sequence[int]) -> Doubles:
        spec = self.tables[table]
        nothing = np.zeros(spec.dim + spec.num_state_floats)
        rows = [self.rows.get((table, id_)) for id_ in ids]
        return np.array([nothing if row is None else row.floats() for row in rows])

    def sweep(self) -> None:
        for (table, id_), row in list(self.rows.items()):
            cause = self._why_it_leaves(table, row)
            if cause is not None:
                self.counts[cause] += 1
                del self.rows[table, id_]

    def clear(self) -> None:
        self.rows.clear()
        self.shared.clear()
        self.num_updates.clear()
        self.seen.clear()

    def counters(self) -> dict[str, int]:
        names = ["hits", "misses", "inserted", "rejected", "evictions"]
        names += [f"expired_{cause}" for cause in ("steps", "seconds", "norm")]
        names += ["gradients_missed", "gradients_refused", "writes_without_room"]
        num_rows = len(self.rows) + len(self.shared)
        rows = {"rows": num_rows, "capacity_rows": self.capacity_rows}
        return {**rows, **{name: self.counts[name] for name in names}}

    def next_to_leave(self) -> list[tuple[int, int]]:
        """Return ``(table, id)`` of every row in the order in which they leave."""
        keys = list(self.rows)
        if self.eviction == "lfu":
            keys.sort(key=lambda key: self.rows[key].frequency_class)
        return keys

    def _make(self, table: int, id_: int) -> Row:
        spec = self.tables[table]
        if len(self.rows) + len(self.shared) == self.capacity_rows:
            del self.rows[self.next_to_leave()[0]]
            self.counts["evictions"] += 1
        weights = initial_weights(spec.initializer, id_ ^ spec.seed, spec.dim)
        state = spec.optimizer.initial_state(spec.dim).astype(np.float64)
        now = {"first_step": self.num_updates[table], "last_s": self.now_s}
        self.counts["inserted"] += 1
        last_step = self.num_updates[table]
        return Row(weights.astype(np.float64), state, last_step=last_step, **now)

    def _count(self, table: int, id_: int, count: int, *, is_first: bool) -> None:
        """Count a lookup; the first of a request says where the row stands."""
        row = self.rows[table, id_]
        row.frequency += count
        if is_first:
            row.frequency_class = frequency_class(row.frequency)
            self.rows.move_to_end((table, id_))

    def _admits(self, table: int, id_: int, count: int) -> bool:
        admission, seed = self.tables[table].admission, self.tables[table].seed
        match admission:
            case AdmitProbability(probability=probability):
                return is_drawn(id_, seed, probability, self.batch)
            case AdmitFrequency(threshold=threshold):
                self.seen[table, id_] += count
                if self.seen[table, id_] < threshold:
                    return False
                self.waited[table, id_] = self.seen.pop((table, id_)) - count
        return True

    def _why_it_leaves(self, table: int, row: Row) -> str | None:
        expiry, step = self.tables[table].expiry, self.num_updates[table]
        if 0 < expiry.steps_to_live < step - row.last_step:
            return "expired_steps"
        if 0 < expiry.seconds_to_live < self.now_s - row.last_s:
            return "expired_seconds"
        is_small = np.linalg.norm(row.weights) < expiry.min_l2_norm
        if is_small and step - row.first_step >= expiry.spared_steps:
            return "expired_norm"
        return None


def frequency_class(frequency: int) -> int:
    """Return the class of LFU: exact below 16, by powers of two above."""
    return frequency if frequency < 16 else 11 + frequency.bit_length()


def is_drawn(id_: int, seed: int, probability: float, batch: int) -> bool:
    """Draw an id by itself, the seed and a batch."""
    golden = 0x9E3779B97F4A7C15
    seed = mixed((seed + golden) % 2**64)
    seed = mixed(((seed ^ batch) + golden) % 2**64)
    draw = mixed(id_ ^ seed) >> 1
    return draw < round(probability * 2**63)


def mixed(word: int) -> int:
    """Return what SplitMix64 makes of a state."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


class ReferenceBloom:
    """A counting Bloom filter as a list, updated conservatively."""

    def __init__(self, num_counters: int, num_hashes: int) -> None:
        self.counters = [0] * num_counters
        self.num_hashes = num_hashes

    def add(self, id_: int, count: int) -> int:
        step = mixed((mixed(id_) + 0x9E3779B97F4A7C15) % 2**64) | 1
        hashes = [(mixed(id_) + k * step) % 2**64 for k in range(self.num_hashes)]
        places = {hash_ * len(self.counters) >> 64 for hash_ in hashes}
        risen = min(min(self.counters[place] for place in places) + count, 255)
        for place in places:
            self.counters[place] = max(self.counters[place], risen)
        return risen


def pool(rows_LD: Doubles, lengths_B: Sequence[int], pooling: str) -> Doubles:
    """Sum the rows of each bag, then divide by 1, n or the root of n.

    Args:
        rows_LD: the row of each id, repeats included.
        lengths_B: ids a bag.
        pooling: sum, mean or sqrt.
    """
    pooled = np.zeros((len(lengths_B), rows_LD.shape[1]))
    bags = np.split(rows_LD, np.cumsum(lengths_B))
    for b, bag in enumerate(bags[: len(lengths_B)]):
        if len(bag):
            pooled[b] = bag.sum(axis=0, dtype=np.float64) * scale(len(bag), pooling)
    return pooled


def scale(length: int, pooling: str) -> float:
    """Return what a bag's sum is multiplied by."""
    return {"sum": 1.0, "mean": 1 / length, "sqrt": float(length) ** -0.5}[pooling]

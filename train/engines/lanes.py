"""One GPU trains several clients side by side, each in a lane with a stream of its own.

Every client's training is that of `sequential`: the same batches in the same order, the same random numbers, batch
norms over the same batches. A lane keeps a model, an optimizer and the batches of one client in memory that stays where
it is, so that its step can be one CUDA graph (`train.engines.capture`) that a counter leads through the batches. The
next client is copied into the same memory. Steps of different lanes alternate, and the GPU runs them at the same time.

On a CPU the same steps run one by one, with the bits of `sequential`.
"""

import gc
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from math import ceil, inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from sharding import Plan, Shard, Update, clip_and_decay
from sharding.layers.base import factorized_layers
from sharding.layers.decomposition import form_of
from sharding.modules.wrappers import named_modules, unwrap
from sharding.rng import seed_of
from sharding.rounds.client import train_model
from sharding.rounds.codec import Terms
from sharding.rounds.plan import Client
from train.engines.capture import CAPTURES, Capturing, Generators, Step, make_capturable, restart, starts_at_zero
from train.engines.engine import Engine, Job, Replies, Reply
from train.engines.local_training import loss_of, make_optimizer, raw_batches
from train.engines.sequential import UnsentBuffer, resident_model, unsent_buffers

PADDED = {"cuda": 8}  # terms of a layer are a multiple of this, by type of device: what tensor cores read at full width
HEADROOM = 1.5  # free memory that a new lane needs, over what the first one took

Layout = tuple[float | None, float | None, tuple[tuple[str, torch.Size], ...]]


class LanesEngine(Engine):
    """Trains as many clients at once as the GPU's memory allows; on a CPU one by one.

    Args:
        job: the job to train.
        num_lanes: the most lanes; by default as many as there is memory for, and one on a CPU.
    """

    def __init__(self, job: Job, num_lanes: int | None = None) -> None:
        self.job = job
        self._is_cuda = job.device.type == "cuda"
        self._most = num_lanes or (inf if self._is_cuda else 1)
        self._capturing = Capturing(job.local, job.device.type in CAPTURES)
        self._lanes: dict[Layout, list[Lane]] = {}
        self._nbytes: dict[Layout, int] = {}  # what the first lane of a layout took

    def train(self, plan: Plan, round: int, lr: float) -> Replies:
        """Yield the clients' replies in the order of the plan."""
        waiting = deque(plan)
        while waiting:
            wave = self._next_wave(plan, waiting)
            unknown = self._is_cuda and len(wave) == 1 and layout(plan, *wave) not in self._nbytes
            before = self._reserved(reset=True) if unknown else 0
            steps = [lane.train(client, plan.shard(client), round, lr) for client, lane in wave.items()]
            for _ in zip_longest(*steps):
                pass
            for client, lane in wave.items():
                if unknown and lane.reply.failure is None:
                    self._nbytes[layout(plan, client)] = self._reserved() - before
                yield client, lane.reply

    def close(self) -> None:
        """Release the lanes' memory."""
        self._lanes.clear()
        if self._is_cuda:
            gc.collect()  # a lane and its steps know each other
            torch.cuda.empty_cache()

    def _next_wave(self, plan: Plan, waiting: deque[Client]) -> dict[Client, "Lane"]:
        """Take the next clients for which there are lanes, at least one, and return each with its lane."""
        wave: dict[Client, Lane] = {}
        promised = 0  # bytes of new lanes, which take their memory when they train
        while waiting and len(wave) < self._most:
            wanted, busy = layout(plan, waiting[0]), list(wave.values())
            lanes = self._lanes.setdefault(wanted, [])
            lane = next((lane for lane in lanes if lane not in busy), None)
            if lane is None and not self._has_room(wanted, promised):
                if busy:
                    break
                self.close()
                lanes = self._lanes.setdefault(wanted, [])
            if lane is None:
                lanes.append(lane := Lane(self.job, self._capturing))
                promised += self._nbytes.get(wanted, 0)
            wave[waiting.popleft()] = lane
            if self._is_cuda and wanted not in self._nbytes:
                break  # the first of a layout trains alone, which tells how much memory a lane takes
        return wave

    def _has_room(self, wanted: Layout, promised: int) -> bool:
        """Return whether there is memory for another lane besides what is promised, as far as known."""
        if not self._is_cuda:
            return True
        free, _ = torch.cuda.mem_get_info(self.job.device)
        return wanted in self._nbytes and free > HEADROOM * (promised + self._nbytes[wanted])

    def _reserved(self, reset: bool = False) -> int:
        """Return the bytes that torch has reserved on the GPU, at most since the last reset."""
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.job.device)
        return torch.cuda.max_memory_reserved(self.job.device)


def layout(plan: Plan, client: Client) -> Layout:
    """Return what clients have in common whose shards fit one lane."""
    shard = plan.template(client)
    tail = tuple((layer, stored.shape) for layer, stored in shard.tail.items())
    return shard.keep_ratio if shard.terms else None, shard.clip, tail  # without terms all layers are whole


class Lane:
    """Trains one client after the other, in the same memory, and keeps the `reply` of the last."""

    reply: Reply
    _model: nn.Module
    _optimizer: Optimizer
    _inputs: Tensor
    _targets: Tensor

    def __init__(self, job: Job, capturing: Capturing) -> None:
        device = job.device
        self.job, self._capturing = job, capturing
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        make_capture = CAPTURES.get(device.type)
        self._capture = None if make_capture is None else make_capture(self._stream)
        self._shared = starts_at_zero(job.local.optimizer)
        self._loss = loss_of(job.dataset, job.local)
        self._unsent: list[tuple[UnsentBuffer, Tensor | None]] = []
        self._generators = Generators(device)
        self._steps: dict[int, Step] = {}
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._total = torch.zeros((), device=device)

    def train(self, client: Client, shard: Shard, round: int, lr: float) -> Iterator[None]:
        """Take a step of the client's training at each iteration; `reply` is there after the last."""
        job, key = self.job, (self.job.seed, round, client)
        self._join()
        try:
            padded = pad(shard, job.model, PADDED.get(job.device.type, 1)) if self._shared else shard
            self._load(padded, job.lr(client, lr))
            sizes = self._load_batches(client, key)
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(job.device))
            for size in sizes:
                with torch.cuda.stream(self._stream):
                    self._take_step(size)
                yield
            self._join()
            self.reply = Reply(cut(padded.read_from(self._model), shard), self._total / len(sizes))
        except Exception as error:
            self.reply = Reply.of_error(client, round, error)
            self._steps.clear()  # one may have failed while it was captured, which spoils the generator of all
            self._generators = Generators(job.device)

    def _join(self) -> None:
        """Let what follows on the current stream wait for the lane."""
        if self._stream is not None:
            torch.cuda.current_stream(self.job.device).wait_stream(self._stream)

    @torch.no_grad()
    def _load(self, shard: Shard, lr: float) -> None:
        """Put a shard's values in the place of the last one's, and begin anew all that a client begins with."""
        if "_model" not in vars(self):
            self._model = resident_model(self.job, shard)
            for layer in factorized_layers(self._model).values():
                layer.dequantize_tail()  # the same numbers in each step; a device has no memory for this
            self._unsent = [(part, part[0]._buffers[part[1]]) for part in unsent_buffers(self._model)]
        layers = factorized_layers(self._model).values()
        places = [layer.tail for layer in layers]
        shard.load_into(self._model)
        for layer, place in zip(layers, places, strict=True):
            layer.dequantize_tail()
            if place is not None and layer.tail is not None:
                layer.tail = place.copy_(layer.tail)
        for (module, name, value), buffer in self._unsent:
            module._buffers[name] = buffer if buffer is None or value is None else buffer.copy_(value)
        self._start_optimizer(shard, lr)
        self._counter.zero_()
        self._total.zero_()

    def _start_optimizer(self, shard: Shard, lr: float) -> None:
        if "_optimizer" in vars(self) and self._shared:
            restart(self._optimizer, lr)
            return
        local = self.job.local
        self._optimizer = make_optimizer(self._model, local, lr)
        self._optimizer.register_step_pre_hook(clip_and_decay(self._model, shard.clip, local.decay, local.decay_of))
        if self._capturing.enabled and not make_capturable(self._optimizer, self.job.device):
            self._capturing.refuse(f"local.optimizer={local.optimizer.name} reads its state on the CPU here")

    def _load_batches(self, client: Client, key: tuple[int | str, ...]) -> list[int]:
        """Copy a client's batches of all epochs to the lane's memory; return their sizes."""
        job = self.job
        self._generators.seed(seed_of("dropout", *key))
        sizes = []
        with self._generators.current():
            for index, (inputs, targets) in enumerate(raw_batches(job.clients[client], job.dataset, job.local, key)):
                if index == 0:
                    self._reserve(inputs, targets)
                self._inputs[index, : len(inputs)], self._targets[index, : len(targets)] = inputs, targets
                sizes.append(len(targets))
        return sizes

    def _reserve(self, inputs: Tensor, targets: Tensor) -> None:
        """Make room for the batches of the largest client, unless it is there."""
        same = "_inputs" in vars(self) and all(
            place.shape[2:] == part.shape[1:] and place.dtype == part.dtype
            for place, part in ((self._inputs, inputs), (self._targets, targets))
        )
        if not same:
            local = self.job.local
            largest = max(map(len, self.job.clients.values()))
            count = local.steps or local.epochs * ceil(largest / local.batch_size)
            size = local.batch_size if local.steps else min(local.batch_size, largest)
            self._inputs, self._targets = (part.new_zeros(count, size, *part.shape[1:]) for part in (inputs, targets))
            self._steps.clear()  # they read from other memory

    def _take_step(self, size: int) -> None:
        if size not in self._steps:
            self._steps[size] = Step(lambda: self._function(size), self._model, self._capture, self._capturing)
        self._generators = self._steps[size].take(self._generators)

    def _function(self, size: int) -> None:
        """Take a step on the next batch, which has this size."""
        inputs, targets = (part.index_select(0, self._counter)[0, :size] for part in (self._inputs, self._targets))
        (loss,) = train_model(self._model, [(inputs, targets)], self._optimizer, self._loss)
        self._total += loss
        self._counter += 1


def pad(shard: Shard, model: nn.Module, multiple: int) -> Shard:
    """Add terms of zeros to a shard, up to a multiple but to no more terms than a layer of the server's model has.

    They change nothing: the gradient of u'ᵢ is a multiple of v'ᵢ and that of v'ᵢ one of u'ᵢ, so both stay zero.
    """
    layers, terms = dict(named_modules(unwrap(model))), {}
    for name, sent in shard.terms.items():
        count = sent.indices.numel()
        most = form_of(layers[name]).rank if name in layers else count
        extra = min(-count % multiple, max(0, most - count))
        if not extra:
            terms[name] = sent
            continue
        u, v = (F.pad(side, (0, extra)) for side in (sent.u, sent.v))
        terms[name] = Terms(F.pad(sent.indices, (0, extra)), u, v, F.pad(sent.multipliers, (0, extra), value=1.0))
    return replace(shard, terms=terms)


def cut(update: Update, shard: Shard) -> Update:
    """Return the update of a padded shard as that of the shard."""
    terms = {}
    for name, trained in update.terms.items():
        sent = shard.terms[name]
        count = sent.indices.numel()
        terms[name] = replace(sent, u=trained.u[:, :count], v=trained.v[:, :count])
    return replace(update, terms=terms)

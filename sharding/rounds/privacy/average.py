"""The average of a round under differential privacy: clipped changes, noisy sums, a public denominator.

What is released is S + N: S is the sum of the clients' changes, each clipped to B, in the coordinates of u', v' and the
parameters that are sent whole, and N has independent normal entries of standard deviation z·B. All else follows from it
and from what is public. Adding or removing one client moves S by at most B, whatever it sends: a change that is too
long is scaled, one with NaN or Inf or of another form counts as zero, and so does a coordinate that a client does not
hold. A term that some client could hold gets noise in every round, also if nobody drew it; else the noise would tell.
docs/theory/privacy.md has the proof.

The clipping is here and not on the clients, so that it binds clients that do not follow the protocol, and is exact
where updates were rounded in transport.

The noise is a function of the secret seed, the plan, and the sums: a round that is run again with the same result
releases the same numbers, and one with another result gets independent noise. With noise of the round alone, the
difference of the two would be free of it. Sums are whole numbers, which have no order of addition: the same updates
give the same sums, whoever arrives first, and in whatever order an update names its tensors.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from hashlib import blake2b
from math import isfinite

import torch
from torch import Tensor

from sharding.modules.wrappers import key
from sharding.rng import generator, seed_of
from sharding.rounds.aggregation.aggregate import Average, Outcome
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.norms import norm_of
from sharding.rounds.plan import Client, Plan
from sharding.rounds.privacy.gaussian import Gaussian
from sharding.rounds.shard import Update


class PrivateAverage(Average):
    """The noisy sum of clipped changes over the expected number of clients. Clients count alike.

    Args:
        plan: the round's shards as sent.
        privacy: the mechanism.
        parameters: the model's, by name; buffers that are sent whole are not averaged.

    Attributes:
        sums: the sums of the clipped changes so far, in units of `unit`, int64, by ``<layer>.<part>`` and names of what
            is sent whole. They are secret.
        unit: B N/2⁶², with N clients that may take part, so that no sum overflows.
    """

    def __init__(self, plan: Plan, privacy: Gaussian, parameters: Collection[str]) -> None:
        super().__init__(plan, dict.fromkeys(plan, 1.0))
        self._privacy, self._release = privacy, ""
        self._levels = 2.0**62 / len(privacy.keep_ratios)
        self.unit = privacy.clipping_norm / self._levels
        self.sums: dict[str, Tensor] = {}
        for layer, spectrum in plan.spectra.items():
            if layer not in plan.fixed:
                for part, side in (("u", spectrum.u), ("v", spectrum.v)):
                    self.sums[key(layer, part)] = torch.zeros_like(side, dtype=torch.int64)
        for name, sent in plan.whole.items():
            if name in parameters and name not in plan.fixed:
                self.sums[name] = torch.zeros_like(sent, dtype=torch.int64)

    def finish(self) -> tuple[dict[str, Tensor], Outcome]:
        """Return the noisy pseudo-gradient and what became of the updates, as `Average.finish`."""
        delta, outcome = super().finish()
        return delta, replace(outcome, release=self._release)

    def _count(self, client: Client, update: Update) -> None:
        """Clip a client's change, round it towards zero, and add it to the sums."""
        changes = self._changes_of(update)
        if not isfinite(norm := float(norm_of(changes))):
            self._rejected[client] = Failure(Kind.NOT_FINITE, "its change is too long to be clipped")
            return
        longest = max(norm, self._privacy.clipping_norm)
        spectra = self._plan.spectra
        columns = {layer: spectra[layer].columns(terms.indices) for layer, terms in update.terms.items()}
        for name, change in changes.items():
            counted = change.div_(longest).mul_(self._levels).long()
            if name in update.whole:
                self.sums[name].add_(counted)
            else:
                self.sums[name].index_add_(1, columns[name.rpartition(".")[0]], counted)

    def _changes_of(self, update: Update) -> dict[str, Tensor]:
        """Return the change of all that is summed, float64, from what the server has."""
        returned, plan = update.trained(), self._plan
        if update.changes:
            return {name: returned[name].to(torch.float64, copy=True) for name in returned if name in self.sums}
        before: dict[str, Tensor] = dict(plan.whole)
        for layer, terms in update.terms.items():
            before[key(layer, "u")], before[key(layer, "v")] = plan.spectra[layer].cut(terms.indices)
        exact = {name: returned[name].to(torch.float64, copy=True) for name in returned if name in self.sums}
        return {name: change.sub_(before[name]) for name, change in exact.items()}

    def _changes(self) -> Iterator[tuple[str, Tensor]]:
        """Add the noise, and yield the name and Δ of every tensor that clients train, in its type."""
        digest = self._digest()
        self._release = f"{seed_of(self._privacy.seed, 'release', self._plan.id, digest):016x}"
        means = {name: self._noisy(name, digest) / self._privacy.per_round for name in list(self.sums)}
        for name, sent in self._plan.whole.items():
            if name in means:
                yield name, means.pop(name).to(sent.dtype)
        for layer, spectrum in self._plan.spectra.items():
            if key(layer, "u") in means:
                u, v = (means.pop(key(layer, part)).add_(getattr(spectrum, part).double()) for part in ("u", "v"))
                yield from self._layer_changes(layer, u, v)

    def _noisy(self, name: str, digest: str) -> Tensor:
        """Return a sum with noise, and forget the sum."""
        sums = self.sums.pop(name).double() * self.unit
        deviation = self._privacy.noise_multiplier * self._privacy.clipping_norm
        rng = generator(self._privacy.seed, "noise", self._plan.id, digest, name, str(deviation))
        return sums + deviation * torch.from_numpy(rng.standard_normal(tuple(sums.shape))).to(sums.device)

    def _digest(self) -> str:
        digest = blake2b(digest_size=32)
        for sums in self.sums.values():
            digest.update(sums.cpu().contiguous().numpy().data)
        return digest.hexdigest()

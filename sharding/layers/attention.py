"""`nn.MultiheadAttention` with each projection as a separate layer.

torch packs the weights of q, k and v in one bare parameter, which tools that look for layers do not see. Unpacked, the
four projections are ordinary `nn.Linear`s that can be sharded one by one. The attention computes the same function.
"""

from collections.abc import Sequence
from math import inf, sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.errors import UserError
from sharding.layers.base import carry_over
from sharding.modules.wrappers import has_own_forward


class UnpackedAttention(nn.Module):
    """A drop-in for `nn.MultiheadAttention`, with the modules `q_proj`, `k_proj`, `v_proj` and `out_proj`.

    `to_packed` undoes it when the projections are ordinary linear layers.

    Raises:
        UserError: `reason_against_unpacking` gives a reason.
    """

    in_proj_bias = None  # nn.TransformerEncoderLayer reads it, and then calls the module instead of its fused kernel
    embed_dim: int
    num_heads: int
    batch_first: bool
    dropout: float

    def __init__(self, packed: nn.MultiheadAttention) -> None:
        super().__init__()
        if reason := reason_against_unpacking(packed):
            raise UserError(f"an nn.MultiheadAttention cannot be unpacked: {reason}")
        carry_over(packed, self)
        self.drop = nn.Dropout(packed.dropout)
        widths = (packed.embed_dim, packed.kdim, packed.vdim, packed.embed_dim)
        weights = (*_input_weights(packed), packed.out_proj.weight)
        biases = [None] * 4 if packed.in_proj_bias is None else [*packed.in_proj_bias.chunk(3), packed.out_proj.bias]
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            _linear(width, weight, bias) for width, weight, bias in zip(widths, weights, biases, strict=True)
        )
        self.train(packed.training)

    @torch.no_grad()
    def to_packed(self) -> nn.MultiheadAttention:
        """Return the `nn.MultiheadAttention` with these projections; a parameter is trainable if any part of it is."""
        inputs = (self.q_proj, self.k_proj, self.v_proj)
        packed = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            self.dropout,
            self.q_proj.bias is not None,
            kdim=self.k_proj.in_features,
            vdim=self.v_proj.in_features,
            batch_first=self.batch_first,
            device=self.q_proj.weight.device,
            dtype=self.q_proj.weight.dtype,
        )
        carry_over(self, packed)
        for target, layer in zip(
            (*_input_weights(packed), packed.out_proj.weight), (*inputs, self.out_proj), strict=True
        ):
            target.copy_(layer.weight)
        if packed.in_proj_bias is not None:
            packed.in_proj_bias.copy_(torch.cat([layer.bias for layer in inputs]))
            packed.out_proj.bias.copy_(self.out_proj.bias)
        _train_alike(packed, inputs, self.out_proj)
        return packed.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `nn.MultiheadAttention` does, with its arguments, shapes and results.

        `is_causal` is a hint about `attn_mask`. It requires a mask, and only the mask is used.
        """
        if is_causal and attn_mask is None:
            raise UserError("is_causal=True needs attn_mask as well, as in nn.MultiheadAttention")
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        heads, first = self.num_heads, self.batch_first
        if not need_weights and not (self.dropout > 0 and self.training):
            return self.out_proj(_attend(q, k, v, attn_mask, key_padding_mask, heads, first)), None
        weights = self.drop(_weights(q, k, attn_mask, key_padding_mask, heads, first))
        out = self.out_proj(_mix(weights, q, v, heads, first))
        return out, _returned_weights(weights, q, average_attn_weights) if need_weights else None


def reason_against_unpacking(attention: nn.MultiheadAttention) -> str | None:
    """Return why an attention cannot be unpacked, or None if it can."""
    if type(attention) is not nn.MultiheadAttention or has_own_forward(attention):
        return f"{type(attention).__name__} may compute something else"
    packed = [attention.in_proj_weight] if attention._qkv_same_embed_dim else _projections(attention)
    if not all(isinstance(weight, nn.Parameter) for weight in (*packed, attention.out_proj.weight)):
        return "a weight of it is computed (parametrized, normalized or pruned)"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "it has add_bias_kv or add_zero_attn"
    return None


# The arithmetic depends on the number of dimensions, which a tracer does not know: it sees these as single steps.
@torch.fx.wrap
def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, padding: Tensor | None, heads: int, batch_first: bool
) -> Tensor:
    """Return the attention's output for projected q, k and v, in their layout."""
    qs, ks, vs = (_heads(x, heads, batch_first) for x in (q, k, v))
    return _joined(F.scaled_dot_product_attention(qs, ks, vs, _additive_mask(mask, padding, qs)), q, batch_first)


@torch.fx.wrap
def _weights(
    q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None, heads: int, batch_first: bool
) -> Tensor:
    """Return the attention weights (batch, heads, queries, keys)."""
    qs, ks = _heads(q, heads, batch_first), _heads(k, heads, batch_first)
    scores = qs @ ks.mT / sqrt(qs.shape[-1])
    added = _additive_mask(mask, padding, qs)
    return (scores if added is None else scores + added).softmax(dim=-1)


@torch.fx.wrap
def _mix(weights: Tensor, q: Tensor, v: Tensor, heads: int, batch_first: bool) -> Tensor:
    """Return the values mixed by the weights, in the layout of q."""
    return _joined(weights @ _heads(v, heads, batch_first), q, batch_first)


@torch.fx.wrap
def _returned_weights(weights: Tensor, q: Tensor, average: bool) -> Tensor:
    """Return the weights as `nn.MultiheadAttention` does."""
    weights = weights.mean(dim=1) if average else weights
    return weights.squeeze(0) if q.dim() == 2 else weights


def _heads(x: Tensor, heads: int, batch_first: bool) -> Tensor:
    """Return (batch, heads, time, width of a head) of (time, width), (batch, time, width) or (time, batch, width)."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    elif not batch_first:
        x = x.transpose(0, 1)
    return x.unflatten(-1, [heads, -1]).transpose(1, 2)


def _joined(attended: Tensor, like: Tensor, batch_first: bool) -> Tensor:
    """Undo `_heads`."""
    joined = attended.transpose(1, 2).flatten(2)
    if like.dim() == 2:
        return joined.squeeze(0)
    return joined if batch_first else joined.transpose(0, 1)


def _additive_mask(mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the mask to add to the scores, broadcast over (batch, heads, queries, keys), or None."""
    total: Tensor | None = None
    if mask is not None:
        total = _additive(mask, q)
        if total.dim() == 3:
            if total.shape[0] != q.shape[0] * q.shape[1]:
                raise UserError(
                    f"attn_mask has {total.shape[0]} matrices, not {q.shape[0] * q.shape[1]}, one per sample and head"
                )
            total = total.unflatten(0, [q.shape[0], q.shape[1]])
    if padding is not None:
        padded = torch.atleast_2d(_additive(padding, q))[:, None, None, :]
        total = padded if total is None else total + padded
    return total


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers to add; True in a boolean mask forbids attention."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -inf)


def _input_weights(packed: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    """Return the weights of q, k and v; torch packs them in one parameter if their shapes are equal."""
    return packed.in_proj_weight.chunk(3) if packed._qkv_same_embed_dim else _projections(packed)


def _projections(attention: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    return attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight


@torch.no_grad()
def _linear(width: int, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(width, len(weight), bias is not None, weight.device, weight.dtype)
    layer.weight.copy_(weight).requires_grad_(weight.requires_grad)
    if bias is not None:
        layer.bias.copy_(bias).requires_grad_(bias.requires_grad)
    return layer


def _train_alike(packed: nn.MultiheadAttention, inputs: Sequence[nn.Linear], out: nn.Linear) -> None:
    """Freeze the parameters that are frozen in the projections; a packed parameter trains if one part does."""
    named = {"in_proj_weight": inputs, "q_proj_weight": inputs[:1], "k_proj_weight": inputs[1:2]}
    for name, layers in (named | {"v_proj_weight": inputs[2:]}).items():
        if isinstance(parameter := getattr(packed, name), Tensor):
            parameter.requires_grad_(any(layer.weight.requires_grad for layer in layers))
    packed.out_proj.weight.requires_grad_(out.weight.requires_grad)
    if packed.in_proj_bias is not None:
        packed.in_proj_bias.requires_grad_(any(layer.bias.requires_grad for layer in inputs))
        packed.out_proj.bias.requires_grad_(out.bias.requires_grad)

"""A mixture's experts, with the step's adapters added to each expert's rows.

On a CPU experts are computed one after the other (`Experts`), because the host knows which experts have rows. On a GPU
this knowledge would make the host wait, so one launch computes all experts (`GroupedExperts`), quantized or not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from loramux_adapters.bank import AdapterBank, Site
from loramux_adapters.base import ParameterShape, expert_name, expert_parameters, expert_weights, mixtures
from loramux_adapters.base_weights import QuantizedExperts
from loramux_adapters.ranks import Ranks
from loramux_kernels.device import runs_triton
from loramux_kernels.lora import lora_expand, lora_shrink
from loramux_kernels.mixture import combine, grouped_coded_linear, grouped_linear, route
from loramux_kernels.packed_linear import DEFAULT_PACKING, PackedLinear, Packing, Weight
from loramux_kernels.quantized_weight import Quantization, QuantizedWeight, joined, quantize, table_of
from loramux_kernels.tables import LoraGroup, LoraTable, Routes, Segments


@dataclass(frozen=True)
class ExpertRuns:
    """The rows that have an adapter, as runs of one expert and one adapter each."""

    rows: torch.Tensor
    """int64[n]: indices of the rows among the rows of the routes."""
    experts: tuple[int, ...]
    slots: tuple[int, ...]
    cu_seqlens: tuple[int, ...]

    @classmethod
    def of(cls, routes: Routes, segments: Segments) -> ExpertRuns:
        """Find the runs. Tokens are ordered by adapter and an expert's rows by token, so an expert's rows are ordered
        by adapter."""
        tokens = routes.tokens.cpu()
        rows = (tokens < segments.rows).nonzero().flatten()
        ends = torch.tensor(segments.cu_seqlens[1:])
        segment = torch.searchsorted(ends, tokens[rows], right=True)
        expert = routes.experts.cpu()[rows]
        runs, lengths = torch.unique_consecutive(torch.stack((expert, segment)), dim=1, return_counts=True)
        experts, numbers = runs.tolist()
        cu_seqlens = (0, *torch.cumsum(lengths, 0).tolist())
        slots = tuple(segments.slots[n] for n in numbers)
        return cls(rows.to(routes.tokens.device), tuple(experts), slots, cu_seqlens)


class ExpertLinear:
    """One linear of every expert: its weights, and the sites of its adapters.

    An adapter's pair for an expert is found in a view of the bank's table with a row for each (slot, site). With this
    view, a kernel computes the rows of all experts at once.
    """

    def __init__(
        self,
        weight: Weight,
        biases: torch.Tensor | None,
        sites: Sequence[Site],
        bank: AdapterBank,
        packing: Packing = DEFAULT_PACKING,
    ) -> None:
        """`weight` is `[experts, out_features, in_features]`, or that of QuantizedExperts."""
        each = _each(weight, len(sites))
        pairs = ((one, None) for one in each) if biases is None else zip(each, biases, strict=True)
        self.linears = [PackedLinear([one], [bias], *packing) for one, bias in pairs]
        self._first_site = sites[0].index
        self._num_sites = len(bank.sites)
        self._bank = bank
        self._group = LoraGroup((0,), (sites[0].out_features,))

    @property
    def num_bytes(self) -> int:
        """Bytes of the experts' weights."""
        return sum(linear.num_bytes for linear in self.linears)

    def __call__(self, x: torch.Tensor, starts: Sequence[int], runs: ExpertRuns | None) -> torch.Tensor:
        """Map `x` `[rows, in_features]` to `[rows, out_features]`; `starts` are the routes', on the host."""
        y = x.new_empty(x.shape[0], self._group.out_features[0])
        for linear, (first, last) in zip(self.linears, pairwise(starts), strict=True):
            if first < last:
                y[first:last] = linear(x[first:last])
        if runs is not None:
            self._add_adapters(x, y, runs)
        return y

    def _add_adapters(self, x: torch.Tensor, y: torch.Tensor, runs: ExpertRuns) -> None:
        pairs = zip(runs.slots, runs.experts, strict=True)
        slots = tuple(slot * self._num_sites + expert for slot, expert in pairs)
        segments = Segments(runs.cu_seqlens, slots)
        table = _by_slot_and_site(self._bank.table, self._first_site)
        if segments.max_rank(table) == 0:
            return
        found, changed = x[runs.rows], y[runs.rows]
        v = lora_shrink(found, self._bank.pool, table, self._group, segments)
        lora_expand(v, self._bank.pool, table, self._group, segments, changed)
        y[runs.rows] = changed


class GroupedExpertLinear:
    """One linear of every expert, as one tensor: its base in one launch, and the sites of its adapters."""

    def __init__(
        self,
        weight: Weight,
        biases: torch.Tensor | None,
        sites: Sequence[Site],
        bank: AdapterBank,
        quantization: Quantization = "none",
    ) -> None:
        """`weight` `[experts, out_features, in_features]`, or that of QuantizedExperts, is kept, or quantized; `biases`
        `[experts, out_features]` are kept."""
        if not isinstance(weight, QuantizedWeight) and quantization != "none":
            # One after the other: the scales of nested quantization depend on the mean of a weight's scales.
            weight = joined([quantize(one, quantization) for one in weight])
        self._base = _grouped_product(weight, biases)
        self.num_bytes = weight.nbytes
        """Bytes of the experts' weights."""
        self.num_experts = len(sites)
        self._first_site = sites[0].index
        self._bank = bank
        self._group = LoraGroup((0,), (sites[0].out_features,))

    def __call__(self, x: torch.Tensor, routes: Routes, segments: Segments | None) -> torch.Tensor:
        """Map `x` `[rows, in_features]` to `[rows, out_features]`, both in the order of `routes`."""
        y = self._base(x, starts=routes.starts)
        if segments is not None:
            table = _by_slot_and_site(self._bank.table, self._first_site)
            v = lora_shrink(x, self._bank.pool, table, self._group, segments)
            lora_expand(v, self._bank.pool, table, self._group, segments, y)
        return y


def _each(weight: Weight, num_experts: int) -> Iterator[Weight]:
    """Yield the weight `[out_features, in_features]` of each expert."""
    if not isinstance(weight, QuantizedWeight):
        yield from weight
        return
    rows = weight.shape[0] // num_experts
    for expert in range(num_experts):
        yield weight.taken([range(expert * rows, (expert + 1) * rows)], None)


def _grouped_product(weight: Weight, biases: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """Return the product of each expert's rows with its weight, in one launch on a GPU."""
    if isinstance(weight, QuantizedWeight):
        return partial(grouped_coded_linear, weight=weight, values=table_of(weight), bias=biases)
    return partial(grouped_linear, weight=weight, bias=biases)


def probe_quantized_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Stand in for the forward of transformers' `experts`, whose weights are QuantizedExperts, until they are packed.

    On a GPU a probe measures the memory of the largest step. On a CPU it reads shapes alone, and the result is zero.
    """
    if not runs_triton(hidden_states):
        return torch.zeros_like(hidden_states)
    return _multiply(experts, hidden_states, top_k_index, top_k_weights)


def multiply_on_gpu(experts: Any) -> None:
    """Let transformers' `experts` compute as `GroupedExperts` do, without adapters, if they are on a GPU."""
    if runs_triton(next(experts.parameters())):
        experts.forward = partial(_multiply, experts)


def _multiply(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the result of transformers' `experts`, without waiting for the host."""
    first, second = expert_parameters(experts)
    up, down = (_grouped_product(_weight_of(experts, name), _bias_of(experts, name)) for name in (first, second))
    routes = route(top_k_index, len(getattr(experts, first)))
    rows = up(hidden_states[routes.tokens], starts=routes.starts)
    return combine(down(_activation_of(experts)(rows), starts=routes.starts), routes, top_k_weights)


LinearT = TypeVar("LinearT", ExpertLinear, GroupedExpertLinear)


class _FeedForwardExperts(nn.Module, Generic[LinearT]):
    """A feed-forward network for each expert, and the adapters of their linears."""

    def __init__(
        self, up: LinearT, down: LinearT, activate: Callable[[torch.Tensor], torch.Tensor], bank: AdapterBank
    ) -> None:
        """`up` makes gate and up together if the family's experts have gates. `activate` is the family's own function
        from its rows to those that `down` takes."""
        super().__init__()
        self._up: LinearT = up
        self._down: LinearT = down
        self._activate = activate
        self._bank = bank

    @property
    def num_bytes(self) -> int:
        """Bytes of the experts' weights."""
        return self._up.num_bytes + self._down.num_bytes


class Experts(_FeedForwardExperts[ExpertLinear]):
    """Replaces a mixture's experts: a feed-forward network for each."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Map `[T, hidden_size]` to the same shape with the chosen experts `[T, k]` and their weights."""
        routes = route(top_k_index, len(self._up.linears))
        starts, segments = routes.starts.tolist(), self._bank.segments
        runs = ExpertRuns.of(routes, segments) if segments is not None else None
        rows = self._down(self._activate(self._up(hidden_states[routes.tokens], starts, runs)), starts, runs)
        # Not `combine`, whose sums are float32: transformers adds up in the common dtype of rows and weights.
        weighted = rows[routes.places] * top_k_weights[..., None]
        return weighted.sum(dim=1).to(hidden_states.dtype)


class GroupedExperts(_FeedForwardExperts[GroupedExpertLinear]):
    """Replaces a mixture's experts on a GPU, which routes, multiplies and adds up without waiting for the host."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Map `[T, hidden_size]` to the same shape with the chosen experts `[T, k]` and their weights."""
        # Imported only if this code runs, because the module needs triton.
        from loramux_kernels.cuda.mixture import expert_segments

        bank = self._bank
        routes = route(top_k_index, self._up.num_experts, bank.kv_slots)
        segments = None
        if bank.segments is not None:
            segments = expert_segments(routes, bank.segments, len(bank.sites), bank.max_rank)
        rows = self._up(hidden_states[routes.tokens], routes, segments)
        rows = self._down(self._activate(rows), routes, segments)
        return combine(rows, routes, top_k_weights)


class ExpertRouter(nn.Module):
    """Replaces a mixture's router: its linear with the adapters added, and then the family's own choice of experts.

    Each family scores and normalises in its own way, in a module that owns the linear's weight. That module is called
    with the logits as tokens and the identity as weight, so its product is the unchanged logits. If the family computes
    logits in float32 from half-precision tokens, this module does the same, because a rounded logit would choose other
    experts.
    """

    def __init__(self, router: Any, site: Site, bank: AdapterBank) -> None:
        """`router`: transformers' module of any family."""
        super().__init__()
        weight: torch.Tensor = router.weight.data
        # Some families pass a bias of the choice, with an element for each expert, in every call.
        biases = [weight.new_zeros(len(weight))] * (len(inspect.signature(router.forward).parameters) - 1)
        with torch.inference_mode():
            told = router(weight.new_zeros(1, weight.shape[1]), *biases)
        # Logits are first or last, depending on the family and on transformers' version.
        logits = next(part for part in told if part.is_floating_point() and part.shape[-1] == len(weight))
        self._dtype = logits.dtype
        self.packed_linear = PackedLinear([weight.to(self._dtype)], [None])
        self._group = LoraGroup((site.index,), (weight.shape[0],))
        self._bank = bank
        eye = torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
        router.weight = nn.Parameter(eye, requires_grad=False)
        router.hidden_dim = len(weight)
        self._choice = router

    def forward(self, hidden_states: torch.Tensor, *biases: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the router's own result: logits, weights and experts of each token."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.packed_linear(x.to(self._dtype))
        bank = self._bank
        if (segments := bank.segments) is not None:
            added = logits if self._dtype == x.dtype else x.new_zeros(logits.shape)
            v = lora_shrink(x, bank.pool, bank.table, self._group, segments)
            lora_expand(v, bank.pool, bank.table, self._group, segments, added)
            logits = logits if added is logits else logits + added
        chosen: tuple[torch.Tensor, ...] = self._choice(logits.view(*hidden_states.shape[:-1], -1), *biases)
        return chosen


def expert_sites(parameters: Mapping[str, ParameterShape], first: int) -> dict[str, Site]:
    """Make a site for each expert of each parameter, numbered from `first`."""
    sites: dict[str, Site] = {}
    for parameter, shape in parameters.items():
        for expert in range(shape.num_experts):
            sites[expert_name(parameter, expert)] = Site(first + len(sites), shape.in_features, shape.out_features)
    return sites


def install_mixtures(
    model: nn.Module,
    bank: AdapterBank,
    packing: Packing = DEFAULT_PACKING,
    ranks: Ranks | None = None,
    track: Callable[[list[Any]], Iterable[Any]] = iter,
) -> tuple[str, ...]:
    """Replace every mixture's experts and router, whose sites `bank` has, and free the weights that they held.

    `ranks` hold a share of every expert each. A mixture's result, including shared experts, is then one sum over the
    ranks. Returns the prefixes of the names of modules whose results are in such a sum.
    """
    found = []
    for mixture in track(list(mixtures(model))):
        module, experts = mixture.module, mixture.module.experts
        if mixture.router is not None:
            site = bank.sites[expert_name(mixture.router_parameter, 0)]
            setattr(module, mixture.router, ExpertRouter(getattr(module, mixture.router), site, bank))
        activate, parameters = _activation_of(experts), expert_parameters(experts)
        is_grouped = runs_triton(next(chain(experts.parameters(), experts.buffers())))
        # One after the other: the weights of the first mixture are freed before those of the second are packed.
        parts = (_take(experts, f"{mixture.name}.experts", parameter, bank) for parameter in parameters)
        if is_grouped:
            first, second = (GroupedExpertLinear(*part, bank, packing.quantization) for part in parts)
            module.experts = GroupedExperts(first, second, activate, bank)
        else:
            up, down = (ExpertLinear(*part, bank, packing) for part in parts)
            module.experts = Experts(up, down, activate, bank)
        summed, whole = (
            (f"{mixture.name}.experts.", module.experts) if mixture.is_layer else (f"{mixture.name}.", module)
        )
        found.append(summed)
        if ranks is not None:
            whole.register_forward_hook(partial(_sum_up, ranks))
    return tuple(found)


def _sum_up(ranks: Ranks, _module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Add up a mixture's result over the ranks; some families also return a router's logits."""
    if isinstance(output, tuple):
        return ranks.all_reduce(output[0].contiguous()), *output[1:]
    return ranks.all_reduce(output.contiguous())


def _take(experts: Any, name: str, parameter: str, bank: AdapterBank) -> tuple[Weight, torch.Tensor | None, list[Site]]:
    """Take weights, biases and sites of one linear of every expert out of transformers' module."""
    sites = [bank.sites[expert_name(f"{name}.{parameter}", e)] for e in range(len(getattr(experts, parameter)))]
    weight = _weight_of(experts, parameter)
    delattr(experts, parameter)
    return weight, _bias_of(experts, parameter), sites


def _weight_of(experts: Any, parameter: str) -> Weight:
    """Return one of the stacked weights of transformers' experts in its current form; see ExpertLinear."""
    held = getattr(experts, parameter)
    return held.quantized if isinstance(held, QuantizedExperts) else expert_weights(experts, parameter)


def _bias_of(experts: Any, parameter: str) -> torch.Tensor | None:
    """Return the biases `[experts, out_features]` of one of transformers' stacked weights; None if it has none."""
    bias = getattr(experts, f"{parameter}_bias", None)
    return None if bias is None else bias.data


def _activation_of(experts: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return transformers' own function from the rows of the first linear to those of the second."""
    activate: Callable[[torch.Tensor], torch.Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
    return activate


def _by_slot_and_site(table: LoraTable, first_site: int) -> LoraTable:
    """View the table with a row for each (slot, site) and one column, from a site of slot 0 on: row `slot * num_sites +
    n` belongs to the slot and to the n-th site after that one."""
    tiles = table.a_offsets.shape[2]
    return LoraTable(
        a_offsets=table.a_offsets.view(-1, 1, tiles)[first_site:],
        b_offsets=table.b_offsets.view(-1, 1, tiles)[first_site:],
        ranks=table.ranks.view(-1, 1)[first_site:],
        scales=table.scales.view(-1, 1)[first_site:],
    )

"""Muon (arXiv:2502.16982) in the step of Megatron's distributed optimizer: a matrix moves along its momentum, made nearly orthogonal.

    gradient  -- each rank, in its range -->  momentum, Nesterov's step
              -- all-to-all              -->  whole matrices, each on one data-parallel rank
              -- Newton-Schulz           -->  nearly orthogonal ones; a matrix that tensor parallelism cuts is gathered for it
              -- all-to-all              -->  each rank's range, which its master weights move along

Embedding, output layer, vectors and what has more than two axes stay with Adam, which runs first. The momentum lies where Adam has its
first moment, and there is no second: sharding, checkpoints and offload are those of Adam. Megatron's own Muon (optimizer/muon.py and
layer_wise_optimizer.py) gives every rank whole matrices instead: it reduces all gradients to all ranks, its checkpoints are tied to
the data-parallel size, and it needs a package that no index has.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moerl.config.schema.train_config import MuonConfig
from moerl.train.memory.memory_states import MUON_ROUND_ELEMENTS
from moerl.train.optimizer.matrices import Matrix, matrices_of, rounds
from moerl.train.optimizer.newton_schulz import scaled_orthogonal


def use_muon(optimizer: Any, chunks: Sequence[nn.Module], muon: MuonConfig) -> None:
    """Collective: let Megatron's distributed optimizers of these wrapped `chunks` update matrices by Muon."""
    names = {weight: (name, chunk.config) for chunk in chunks for name, weight in chunk.named_parameters() if weight.requires_grad}
    for each in optimizer.chained_optimizers:
        if not each.is_stub_optimizer and (matrices := matrices_of(each, names)):
            each.optimizer.step = MuonStep(each, matrices, muon)


class MuonStep:
    """The step of a distributed optimizer's inner one: Adam's, then Muon's."""

    def __init__(self, optimizer: Any, matrices: Sequence[Matrix], muon: MuonConfig):
        """Takes the place of the inner optimizer's own."""
        self._optimizer, self._muon, self._inner_step = optimizer, muon, optimizer.optimizer.step
        self._group: dist.ProcessGroup = optimizer.data_parallel_group
        self._rounds = rounds(matrices, MUON_ROUND_ELEMENTS)
        first = matrices[0].weight
        self._nothing = first.new_empty(0, dtype=torch.promote_types(first.dtype, torch.float32))

    @torch.no_grad()
    def __call__(self) -> None:
        own = {matrix.weight: self._own(matrix.weight) for part in self._rounds for matrix in part if matrix.numel(self._group.rank())}
        self._step_others({main for main, _ in own.values()})
        for part in self._rounds:
            steps = {matrix.weight: self._momentum(own[matrix.weight][0]) for matrix in part if matrix.weight in own}
            for weight, step in self._orthogonal(part, steps).items():
                main, settings = own[weight]
                main.mul_(1 - settings["lr"] * settings["weight_decay"]).add_(step, alpha=-settings["lr"])

    def _step_others(self, matrices: set[Tensor]) -> None:
        """Adam's step, which does not see `matrices`: it would make moments even for what has no gradient."""
        groups = [group for group in self._optimizer.optimizer.param_groups if group["params"]]
        whole = [(group["params"], group.get("step", 0) + 1) for group in groups]
        try:
            for group in groups:
                group["params"] = [main for main in group["params"] if main not in matrices]
            self._inner_step()
        finally:
            for group, (mains, steps) in zip(groups, whole, strict=True):
                group["params"], group["step"] = mains, steps  # which Adam counts in groups without parameters, or not (by version)

    def drop_second_moments(self) -> None:
        """Those of matrices, which have none, where Megatron made the states of all parameters."""
        for matrix in (matrix for part in self._rounds for matrix in part if matrix.numel(self._group.rank())):
            self._optimizer.optimizer.state[self._own(matrix.weight)[0]].pop("exp_avg_sq", None)

    def _own(self, weight: nn.Parameter) -> tuple[Tensor, dict[str, Any]]:
        """This rank's range of the master weights, flat, and the settings of its group."""
        group, order = self._optimizer.model_param_group_index_map[weight]
        settings = self._optimizer.optimizer.param_groups[group]
        return settings["params"][order], settings

    def _momentum(self, main: Tensor) -> Tensor:
        """Nesterov's step."""
        state, beta, gradient = self._optimizer.optimizer.state[main], self._muon.momentum, main.grad
        assert gradient is not None, "every rank has gradients of all its weights"
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(main)
        return gradient.lerp(state["exp_avg"].lerp_(gradient, 1 - beta), beta)

    def _orthogonal(self, part: Sequence[Matrix], steps: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """`steps`, this rank's ranges of matrices of `part`: orthogonal and scaled. Collective over data parallelism."""
        rank, size, order = self._group.rank(), self._group.size(), sorted(part, key=lambda matrix: matrix.owner)
        mine = [matrix for matrix in part if matrix.owner == rank]
        held = [sum(matrix.numel(rank) for matrix in part if matrix.owner == owner) for owner in range(size)]
        coming = [sum(matrix.numel(sender) for matrix in mine) for sender in range(size)]

        flat = self._gathered(order, mine, steps, held, coming)
        self._make_orthogonal(flat)
        back = torch.cat([self._nothing, *(flat[matrix][slice(*matrix.ranges[owner])] for owner in range(size) for matrix in mine)])
        flat.clear()
        returned = self._exchange(back, coming, held).split([matrix.numel(rank) for matrix in order])
        return {matrix.weight: piece for matrix, piece in zip(order, returned, strict=True) if len(piece)}

    def _gathered(
        self, order: list[Matrix], mine: list[Matrix], steps: dict[nn.Parameter, Tensor], held: list[int], coming: list[int]
    ) -> dict[Matrix, Tensor]:
        """Whole matrices of this rank, flat. `steps` is empty afterwards."""
        sent = torch.cat([self._nothing, *(steps.pop(matrix.weight) for matrix in order if matrix.weight in steps)])
        sizes = [matrix.numel(sender) for sender in range(self._group.size()) for matrix in mine]
        pieces = self._exchange(sent, held, coming).split(sizes)
        return {matrix: torch.cat(pieces[number :: len(mine)]) for number, matrix in enumerate(mine)}

    def _exchange(self, flat: Tensor, going: list[int], coming: list[int]) -> Tensor:
        if self._group.size() == 1:
            return flat
        received = flat.new_empty(sum(coming))
        dist.all_to_all_single(received, flat, coming, going, group=self._group)
        return received

    def _make_orthogonal(self, flat: dict[Matrix, Tensor]) -> None:
        """In place: those alike together, the same on every tensor-parallel rank. Peak: a kind of matrices, not all."""
        kinds: dict[tuple[Any, ...], list[Matrix]] = {}
        for matrix in flat:
            kinds.setdefault(matrix.kind, []).append(matrix)
        for same in kinds.values():
            stacked = torch.stack([flat.pop(matrix).view(matrix.weight.shape) for matrix in same])
            for matrix, step in zip(same, self._of_kind(stacked, same[0]), strict=True):
                flat[matrix] = step.flatten()

    def _of_kind(self, steps: Tensor, like: Matrix) -> Tensor:
        """[matrices, rows, columns] of this tensor-parallel rank. What it cuts is gathered, and cut again."""
        narrow = torch.bfloat16 if like.weight.dtype == torch.bfloat16 else steps.dtype
        if like.cut is None:
            return scaled_orthogonal(steps, like.rows, narrow) * self._muon.update_rms
        group = like.tensor_group
        shards = [torch.empty_like(steps) for _ in range(group.size())]
        dist.all_gather(shards, steps, group=group)
        whole = scaled_orthogonal(torch.cat(shards, like.cut + 1), like.rows, narrow) * self._muon.update_rms
        return whole.chunk(group.size(), like.cut + 1)[group.rank()]

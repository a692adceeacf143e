"""Slice a batch: this rank's rows of every micro-batch.

A batch is given in full, or as this rank's part of it (`local_part`): its rows of one micro-batch
after another. An input without samples, from which something is precomputed, or that stages of this
rank shard differently, is read in full; one that no stage of this rank uses is not read at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.mesh import TIME, ProcessMesh
from shardwise.runtime.pipeline.spec import PipelineSpec, StageModules
from shardwise.runtime.splits import Split, local_shape, take_local
from shardwise.shares import part

__all__ = ["BatchReader"]


class BatchReader:
    """Takes this rank's rows out of batches."""

    def __init__(
        self,
        spec: PipelineSpec,
        stages: Mapping[int, StageModules],
        mesh: ProcessMesh,
        shapes: Mapping[str, tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self.spec, self.stages, self.mesh, self.device = spec, stages, mesh, device
        self.shapes = shapes  # of the full batch's inputs
        self._splits: dict[str, Any] = {}
        self._whole: set[str] = set()
        for stage in stages.values():
            if stage.beforehand is not None:
                self._whole |= set(stage.beforehand[1].INPUTS)
            for name, splits in stage.generated[0].INPUTS.items():
                known = self._splits.setdefault(name, splits)
                if name not in spec.batch_dims or known != splits:
                    self._whole.add(name)

    def beforehand(self, inputs: Mapping[str, Tensor], stage: int) -> tuple[Any, ...]:
        """Compute what micro-batches of a stage need of the full batch."""
        result = self.stages[stage].beforehand
        if result is None:
            return ()
        module, generated = result
        local = [
            _part(inputs[name], splits, self.mesh.coordinates, self.mesh.axes)
            for name, splits in generated.INPUTS.items()
        ]
        with torch.no_grad():
            _, values = module(*(tensor.to(self.device) for tensor in local), outputs=True)
        return tuple(values)

    def microbatch(
        self, inputs: Mapping[str, Tensor], generated: Any, k: int, *, whole: bool
    ) -> Iterator[Tensor]:
        """Iterate over this rank's rows of micro-batch `k`, in the order of the file's inputs."""
        for name, splits in generated.INPUTS.items():
            tensor = inputs[name]
            if whole or name in self._whole:
                rows = self._rows(tensor, name, splits, k)
            else:
                dim = self.spec.batch_dims[name]
                counts = [shape[dim] for shape in self._row_shapes(name)]
                rows = tensor.narrow(dim, sum(counts[:k]), counts[k])
            yield rows.to(self.device)

    def local_part(self, name: str, tensor: Tensor) -> Tensor:
        """Return what this rank reads of a full input."""
        if name in self._whole:
            return tensor
        if name not in self._splits:
            return tensor.new_empty(0)
        count = self.spec.num_microbatches
        rows = [self._rows(tensor, name, self._splits[name], k) for k in range(count)]
        return torch.cat(rows, self.spec.batch_dims[name])

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of what this rank reads of an input."""
        if name in self._whole:
            return self.shapes[name]
        if name not in self._splits:
            return (0,)
        dim, rows = self.spec.batch_dims[name], self._row_shapes(name)
        return (*rows[0][:dim], sum(shape[dim] for shape in rows), *rows[0][dim + 1 :])

    def _row_shapes(self, name: str) -> list[tuple[int, ...]]:
        """Return the shapes of this rank's rows of every micro-batch."""
        result = []
        for k in range(self.spec.num_microbatches):
            shape = list(self.shapes[name])
            if not self.spec.timed:
                dim = self.spec.batch_dims[name]
                shape[dim] = part(shape[dim], self.spec.num_microbatches, k)[1]
            place, axes = self._place(k), self.mesh.place_axes
            result.append(local_shape(shape, self._splits[name], place, axes))
        return result

    def _rows(self, tensor: Tensor, name: str, splits: Sequence[Split], k: int) -> Tensor:
        """Return this rank's rows of one micro-batch of a full input."""
        dim = self.spec.batch_dims.get(name)
        if not self.spec.timed and dim is not None:
            tensor = tensor.narrow(dim, *part(tensor.shape[dim], self.spec.num_microbatches, k))
        return _part(tensor, splits, self._place(k), self.mesh.place_axes)

    def _place(self, k: int) -> Mapping[str, int]:
        place = self.mesh.place
        return {**place, TIME: k} if TIME in place else place


def _part(
    tensor: Tensor, splits: Sequence[Split], place: Mapping[str, int], axes: Mapping[str, int]
) -> Tensor:
    return take_local(tensor.detach(), splits, place, axes).contiguous()

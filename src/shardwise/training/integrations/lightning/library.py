"""The names of Lightning that the strategy uses, from the package that the user imports.

`lightning.pytorch` and `pytorch_lightning` are two installations of the same code whose classes do
not know each other. A program that has imported only the latter gets strategies of the latter.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

__all__ = [
    "DoublePrecision",
    "HalfPrecision",
    "LightningModule",
    "MixedPrecision",
    "MockOptimizer",
    "MultiProcessingLauncher",
    "ParallelStrategy",
    "Precision",
    "ScriptLauncher",
    "TrainerFn",
    "default_backend",
    "init_connection",
    "init_optimizers",
    "is_overridden",
    "is_param_in_hook_signature",
    "reduce_if_available",
    "seed_worker",
    "set_rank_zero",
]


def _packages() -> tuple[str, str]:
    """The roots of PyTorch Lightning and of Fabric."""
    unified = importlib.util.find_spec("lightning") is not None
    separate = importlib.util.find_spec("pytorch_lightning") is not None
    if not unified and not separate:
        raise ModuleNotFoundError("Lightning is missing; try: pip install 'shardwise[lightning]'")
    imported = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    if separate and (imported or not unified):
        return "pytorch_lightning", "lightning_fabric"
    return "lightning.pytorch", "lightning.fabric"


PACKAGE, FABRIC = _packages()


if TYPE_CHECKING:
    from lightning.fabric.utilities.distributed import (
        _get_default_process_group_backend_for_device as default_backend,
    )
    from lightning.fabric.utilities.distributed import _init_dist_connection as init_connection
    from lightning.fabric.utilities.distributed import (
        _sync_ddp_if_available as reduce_if_available,
    )
    from lightning.fabric.utilities.seed import pl_worker_init_function as seed_worker
    from lightning.pytorch import LightningModule
    from lightning.pytorch.core.optimizer import (
        _init_optimizers_and_lr_schedulers as init_optimizers,
    )
    from lightning.pytorch.core.optimizer import _MockOptimizer as MockOptimizer
    from lightning.pytorch.plugins.precision import (
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from lightning.pytorch.strategies.launchers import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from lightning.pytorch.strategies.launchers import (
        _SubprocessScriptLauncher as ScriptLauncher,
    )
    from lightning.pytorch.strategies.parallel import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:

    def _find(path: str, root: str = PACKAGE) -> Any:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(f"{root}.{module}" if module else root), name)

    LightningModule = _find("LightningModule")
    MockOptimizer = _find("core.optimizer._MockOptimizer")
    init_optimizers = _find("core.optimizer._init_optimizers_and_lr_schedulers")
    DoublePrecision = _find("plugins.precision.DoublePrecision")
    HalfPrecision = _find("plugins.precision.HalfPrecision")
    MixedPrecision = _find("plugins.precision.MixedPrecision")
    Precision = _find("plugins.precision.Precision")
    MultiProcessingLauncher = _find("strategies.launchers._MultiProcessingLauncher")
    ScriptLauncher = _find("strategies.launchers._SubprocessScriptLauncher")
    ParallelStrategy = _find("strategies.parallel.ParallelStrategy")
    TrainerFn = _find("trainer.states.TrainerFn")
    is_overridden = _find("utilities.model_helpers.is_overridden")
    is_param_in_hook_signature = _find("utilities.signature_utils.is_param_in_hook_signature")
    default_backend = _find(
        "utilities.distributed._get_default_process_group_backend_for_device", FABRIC
    )
    init_connection = _find("utilities.distributed._init_dist_connection", FABRIC)
    reduce_if_available = _find("utilities.distributed._sync_ddp_if_available", FABRIC)
    seed_worker = _find("utilities.seed.pl_worker_init_function", FABRIC)


def set_rank_zero(rank: int) -> None:
    """Tell Lightning's `rank_zero_only` functions which rank this is."""
    for name in (f"{PACKAGE}.utilities.rank_zero", "lightning_utilities.core.rank_zero"):
        importlib.import_module(name).rank_zero_only.rank = rank

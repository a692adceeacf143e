"""All that generated code imports: meshes, collectives, parameters, optimizers, random numbers.

Nothing here knows the compiler.
"""

from shardwise.runtime.batches import *  # noqa: F403
from shardwise.runtime.checksums import *  # noqa: F403
from shardwise.runtime.collectives import *  # noqa: F403
from shardwise.runtime.deferred import *  # noqa: F403
from shardwise.runtime.executor import *  # noqa: F403
from shardwise.runtime.failures import *  # noqa: F403
from shardwise.runtime.freezing import *  # noqa: F403
from shardwise.runtime.hooks import *  # noqa: F403
from shardwise.runtime.mesh import *  # noqa: F403
from shardwise.runtime.module import *  # noqa: F403
from shardwise.runtime.noting import *  # noqa: F403
from shardwise.runtime.offload import *  # noqa: F403
from shardwise.runtime.operators import *  # noqa: F403
from shardwise.runtime.operators.factories import *  # noqa: F403
from shardwise.runtime.optimizer import *  # noqa: F403
from shardwise.runtime.parameters import *  # noqa: F403
from shardwise.runtime.pipeline import *  # noqa: F403
from shardwise.runtime.precision import *  # noqa: F403
from shardwise.runtime.pretend import *  # noqa: F403
from shardwise.runtime.probe import *  # noqa: F403
from shardwise.runtime.processes import *  # noqa: F403
from shardwise.runtime.random import *  # noqa: F403
from shardwise.runtime.recompute import *  # noqa: F403
from shardwise.runtime.recorder import *  # noqa: F403
from shardwise.runtime.sharing import *  # noqa: F403
from shardwise.runtime.splits import Split as Split
from shardwise.runtime.splits import take_local as take_local
from shardwise.runtime.step import *  # noqa: F403
from shardwise.runtime.store import *  # noqa: F403
from shardwise.runtime.threads import *  # noqa: F403
from shardwise.runtime.tied import *  # noqa: F403
from shardwise.runtime.trace import *  # noqa: F403
from shardwise.runtime.transfers import *  # noqa: F403

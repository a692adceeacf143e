"""Everything that emitted code and the layers above call, imported explicitly.

Nothing here knows the compiler: emitted modules need only this package and torch.
"""

from shardwise.inexact import Compression, Inexact, OuterOptimizer
from shardwise.runtime.consistency import (
    BATCH_CHECK_EVERY,
    checksum,
    require_same_lengths,
    share,
    share_lists,
    signature,
)
from shardwise.runtime.failures import naming_failures
from shardwise.runtime.grad_sync import LossScaler
from shardwise.runtime.memory import keep_products
from shardwise.runtime.mesh import ProcessMesh
from shardwise.runtime.module import ParallelModule
from shardwise.runtime.operators import empty_result, empty_results, no_channels, require_in_range
from shardwise.runtime.operators.positions import (
    arange,
    embedding_bag,
    embedding_rows,
    eye,
    linspace,
    nothing,
    one_hot,
    tril,
    triu,
)
from shardwise.runtime.operators.reductions import (
    all_true,
    amax,
    amin,
    any_true,
    batch_norm,
    layer_norm,
    logsumexp,
    partial_mean,
    rms_norm,
    std,
    std_mean,
    var,
    var_mean,
    vector_norm,
    weight_norm,
)
from shardwise.runtime.operators.ring import ring_attention
from shardwise.runtime.operators.routing import (
    collect,
    dispatch,
    grouped_linear,
    route,
    to_experts,
    to_tokens,
)
from shardwise.runtime.operators.softmax import (
    attention,
    cross_entropy,
    log_softmax,
    nll_loss,
    partial_loss,
    softmax,
)
from shardwise.runtime.optimizer import ShardedOptimizer, clip_grad_norm_, optimizer
from shardwise.runtime.parameters import (
    BufferSpec,
    ParameterSpec,
    Scope,
    attach,
    declare,
    declare_buffer,
)
from shardwise.runtime.pipeline import OutputSpec, PipelineSpec, StageSpec, TiedSpec, TransferSpec
from shardwise.runtime.pipeline.weight_grad import (
    WeightQueue,
    addmm,
    conv,
    embedding,
    linear,
    matmul,
)
from shardwise.runtime.redistribute import (
    all_to_all,
    as_partial,
    fanout,
    gather,
    gather_fanout,
    once,
    pad,
    reduce,
    reduce_fanout,
    reduce_scatter,
    shard,
    take,
)
from shardwise.runtime.rng import (
    Rng,
    alpha_dropout,
    bernoulli,
    draw,
    draw_like,
    dropout,
    multinomial,
    native_dropout,
)
from shardwise.runtime.splits import Split, take_local
from shardwise.runtime.step import ProgramKey, StepOptions, StepProgram
from shardwise.runtime.store import ParameterStore
from shardwise.runtime.sync_forms import linear_factors
from shardwise.runtime.tracing import Recorder, Records, probe, recording
from shardwise.runtime.transport.process_group import process_meshes
from shardwise.runtime.user_model import RegisteredHooks, TrainedFlags, hooked

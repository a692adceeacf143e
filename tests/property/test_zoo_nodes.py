"""Every candidate of the zoo's mathematical nodes, with the models' own values."""

from __future__ import annotations

import pytest

from shardwise.frontend import capture, flatten_batch
from shardwise.ir import map_refs
from shardwise.ir.operators import interpret, is_random
from tests.property.rule_examples_math import CONSTANT, EXAMPLES, RUN
from tests.support import zoo
from tests.support.rules import check_rule

FAMILIES = {op.rsplit(".", 1)[0] for op in EXAMPLES}
CHECKED: set[tuple[str, ...]] = set()  # models share most of their calls


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
def test_every_candidate_of_every_node(name: str) -> None:
    model, batch = zoo.build(name)
    graph = capture(model, batch)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values = interpret(graph, parameters, buffers, flatten_batch(batch)[0])
    for node in graph.nodes:
        types = tuple(str(graph.values[i]) for i in node.inputs)
        constants = str(map_refs((node.args, node.kwargs), lambda _: None))
        key = (node.op, constants, *types)
        if node.op.rsplit(".", 1)[0] not in FAMILIES or is_random(node) or key in CHECKED:
            continue
        CHECKED.add(key)
        args, kwargs = map_refs((node.args, node.kwargs), lambda ref: values[ref.name].detach())
        options = {"run": RUN.get(node.op), "constant": CONSTANT.get(node.op, ())}
        check_rule(node.op, args, dict(kwargs), ranks=(3,), **options)

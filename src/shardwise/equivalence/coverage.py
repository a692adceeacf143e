"""Describe what the trials of a check did not exercise, so that errors there would not be seen."""

from collections.abc import Sequence

import torch

from shardwise.equivalence.ranks import Subject
from shardwise.equivalence.trial import Trial
from shardwise.ir import Graph
from shardwise.sharding.candidates import candidates
from shardwise.sharding.factors import analyze
from shardwise.sharding.registry import is_registered


def not_exercised(graph: Graph, trials: Sequence[Trial]) -> tuple[str, ...]:
    """Describe what no trial could confirm.

    A program may treat a parameter without gradient, a value that is always zero or an unused input
    in any manner and still agree with the model.
    """
    lines = []
    for parameter in graph.parameters:
        gradients = [trial.reference.gradients.get(parameter.name) for trial in trials]
        if parameter.requires_grad and all(map(_is_zero, gradients)):
            lines.append(f"parameter {parameter.name}: its gradient is zero")
    last = trials[-1].inputs
    same = {n for n, tensor in trials[0].inputs.items() if torch.equal(tensor, last[n])}
    used = {name for node in graph.nodes for name in node.inputs}
    for source in graph.inputs:
        if source.value not in used:
            lines.append(f"input {source.name}: nothing reads it")
        elif source.name in same and len(same) < len(graph.inputs) and len(trials) > 1:
            lines.append(f"input {source.name}: the same in all trials")
    for guard in graph.guards.checks if graph.guards else ():
        lines.append(
            f"batches in which Python sees another value than {guard.answer}: {guard.source}"
        )
    for node in graph.nodes:
        for name in node.outputs:
            if name not in trials[0].truth.gradients:
                continue
            if all(_is_zero(trial.truth.values[name]) for trial in trials):
                lines.append(f"%{name} ({node.op}) at {node.origin}: its value is zero")
            elif all(_is_zero(trial.truth.gradients.get(name)) for trial in trials):
                lines.append(f"%{name} ({node.op}) at {node.origin}: its gradient is zero")
            for operand in node.inputs:
                if all((node.name, operand) in trial.hidden for trial in trials):
                    use = f"the use of %{operand} in %{name} ({node.op}) at {node.origin}"
                    lines.append(f"{use}: its part of the gradient is negligible")
    if len(trials) == 1:
        lines.append("other weights and batches: the model does not run on changed ones")
    return tuple(lines)


def unused_choices(subject: Subject) -> tuple[str, ...]:
    """Describe the choices of users' rules that no node takes, so that no trial confirms them."""
    taken: dict[str, dict[str, bool]] = {}  # operator -> choice -> whether a node takes it
    for program in (view.program for view in subject.views):
        nodes = [node for node in program.graph.nodes if is_registered(node.op)]
        if not nodes:
            continue
        facts, rank = analyze(program.graph), program.rank_programs[0]
        steps = {step.node: step for step in rank.steps if not step.is_move}
        for node in nodes:
            choices, step = taken.setdefault(node.op, {}), steps[node.name]
            layouts = (step.needs, [rank.values[name].layout for name in node.outputs])
            placed = [
                tuple(tuple(layout[axis] for layout in side) for side in layouts)
                for axis, _ in program.mesh.axes
            ]
            for option in candidates(facts.rules[node.name], facts.structures[node.name])[1:]:
                text = str(option.choice).partition(":")[0]
                is_taken = (option.operands, option.results) in placed
                choices[text] = choices.get(text, False) or is_taken
    unused = {op: [text for text in choices if not choices[text]] for op, choices in taken.items()}
    return tuple(f"rule of {op}: no node takes {', '.join(c)}" for op, c in unused.items() if c)


def _is_zero(tensor: torch.Tensor | None) -> bool:
    return tensor is None or not bool(tensor.any())

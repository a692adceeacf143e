"""Which decision of a plan a node follows from.

Enters: a `Program` and a node. Leaves: text that names the plan's entry: an override of the node,
the entries of its parameters, or the choice that followed for each mesh axis.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from shardwise.errors import ProgramError, ShardwiseError
from shardwise.ir import Node, Parameter
from shardwise.plans import Resolved, resolve
from shardwise.program import Program, Step


class Blame:
    """Answers for one program; the plan is resolved again on the first question."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph, self.plan = program.graph, program.plan
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.parameters = {p.value: p for p in self.graph.parameters}
        self._resolved: Resolved | None = None

    def describe(self, node: Node) -> str:
        """`node linear_3 (aten.linear.default) at blocks.0.fc (model.py:41)`."""
        text = f" `{node.source_text}`" if node.source_text else ""
        return f"node {node.name} ({node.op}) at {node.origin}{text}"

    def entries(self, node: Node) -> str:
        """Return the plan's entries that decide this node, as they stand in the plan file."""
        found = []
        for axis, choice in self.plan.choices(self.graph).get(node.name, {}).items():
            found.append(f'nodes["{node.name}"]: {axis} "{choice}"')
        for value in dict.fromkeys(node.inputs):
            if value in self.parameters:
                found += self.parameter_entries(self.parameters[value])
        return "; ".join([*found, *self._choices(node)]) or "no entry of the plan"

    def parameter_entries(self, parameter: Parameter) -> list[str]:
        """Return the globs that match a parameter, with what they say."""
        found = []
        for glob, entry in self.plan.parameters.items():
            if not any(fnmatchcase(n, glob) for n in (parameter.name, *parameter.aliases)):
                continue
            said = [f"{axis} {cut}" for axis, cut in entry.layout.items()]
            said += [f"zero {entry.zero}"] if entry.zero else []
            found.append(f'parameters["{glob}"]: {", ".join(said) or "whole"}')
        return found

    def _choices(self, node: Node) -> list[str]:
        try:
            self._resolved = self._resolved or resolve(self.graph, self.plan)
        except ShardwiseError:
            return [f"{axis}: {role}" for axis, role in self.plan.roles.items()]
        return [
            f"{a.axis} ({self.plan.roles[a.axis]}): {a.nodes[node.name].choice}"
            for a in self._resolved.assignments
            if node.name in a.nodes
        ]

    def structure(self) -> str | None:
        """What the program's own check finds wrong, if anything."""
        try:
            self.program.verify()
        except ProgramError as error:
            return str(error).splitlines()[0]
        return None

    def uses(self, value: str) -> list[str]:
        """Return the nodes that use a graph value, described."""
        return [self.describe(n) for n in self.graph.nodes if value in n.inputs]

    def step_text(self, step: Step) -> str:
        """`rt.reduce over tp for node …`, or the node itself."""
        if not step.node:
            return f"{step.fn} over {'.'.join(step.axes)}"
        described = self.describe(self.nodes[step.node])
        if not step.is_move:
            return described
        return f"{step.fn} over {'.'.join(step.axes)} for {described}"

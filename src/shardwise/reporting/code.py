"""The generated code next to the user's source lines.

Enters: a graph and a plan, compiled; or what a plan's file holds of that. Leaves: `Code`. Generated
files say in comments which line of the user's a group of statements came from; every line below
such a comment is of that line, until the next comment or the end of the function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.ir import Graph
from shardwise.messages.ranks import format_ranks, parse_ranks
from shardwise.plans import Plan
from shardwise.plans.search_result import GeneratedCode, GeneratedFile, PlanDetails
from shardwise.reporting.document import Code, CodeFile
from shardwise.reporting.sections import source_row

QUICKLY = 3_000  # nodes up to which a plan's code is made in a few seconds
MOST_CHARACTERS = 400_000  # of code in a plan's file
COMMENT = re.compile(r"^\s*# .*\((?P<source>[^()]+:\d+)\)\s*$")
DOCSTRING = re.compile(r'^\s*""".*\((?P<source>[^()]+:\d+)\)\."""\s*$')


def with_code(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with its generated code among the details of its figures."""
    code = generated_code(graph, plan.with_(search=None))
    details = replace(plan.figures.details, code=code, code_missing="")
    return plan.with_(search=replace(plan.figures, details=details))


def with_code_if_quick(plan: Plan, graph: Graph, target: str) -> Plan:
    """Return the same where it takes a few seconds and little room; else say what to type."""
    if plan.search is None:
        return plan
    why = f"{len(graph.nodes):,} nodes take a while to compile"
    if len(graph.nodes) <= QUICKLY:
        try:
            made = with_code(plan, graph)
        except ShardwiseError as error:  # the plan is there all the same
            why = f"The code could not be written ({error.message})"
        else:
            files = made.figures.details.code.files if made.figures.details.code else ()
            length = sum(len(file.text) for file in files)
            if length <= MOST_CHARACTERS:
                return made
            why = f"{len(files)} generated files of {length:,} characters are left out"
    reason = f"{why} here. shardwise report plan.json {target}"
    details = replace(plan.search.details, code_missing=reason)
    return plan.with_(search=replace(plan.search, details=details))


def generated_code(graph: Graph, plan: Plan) -> GeneratedCode:
    """Return the generated files, and the text of every source line that they mention."""
    from shardwise.api.compiled import PipelineProgram, compile

    program = compile(graph, plan)
    if isinstance(program, PipelineProgram):
        named = list(_pipeline_files(program))
    else:
        pairs = zip(program.sources, program.lowered.rank_programs, strict=True)
        named = [(f"rank_{rank.ranks[0]}.py", rank.ranks, text) for text, rank in pairs]
    files = tuple(
        GeneratedFile(name=name, ranks=format_ranks(ranks), text=text)
        for name, ranks, text in named
    )
    used = {source for file in files for source in _sources(file.text.splitlines()) if source}
    texts = {node.source: node.source_text for node in graph.nodes if node.source in used}
    return GeneratedCode(files=files, texts=texts)


def _pipeline_files(program: Any) -> Iterable[tuple[str, tuple[int, ...], str]]:
    """Return the files with the ranks that run them; stages that are written alike are one file."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    everyone = tuple(range(program.plan.num_ranks))
    for name, text in program.text.files().items():
        ranks = everyone
        if name.startswith("stage_"):
            ranks = program.lowered.stages[int(name.removesuffix(".py").split("_")[1])].ranks
        first, before = found.get(text, (name, ()))
        found[text] = (first, tuple(sorted({*before, *ranks})))
    return [(name, ranks, text) for text, (name, ranks) in found.items()]


def read_code(details: PlanDetails) -> Code | None:
    """Return the code that a plan's file holds, if any."""
    found = details.code
    if found is None:
        return None
    numbers: dict[str, int] = {}
    files = []
    for file in found.files:
        parse_ranks(file.ranks, "search.details.code")
        lines = file.text.splitlines()
        sources = [
            numbers.setdefault(source, len(numbers)) if source else -1 for source in _sources(lines)
        ]
        files.append(
            CodeFile(
                name=file.name,
                ranks=file.ranks,
                lines=tuple(lines),
                sources=tuple(sources),
            )
        )
    return Code(
        files=tuple(files),
        sources=tuple(source_row(source, found.texts.get(source, "")) for source in numbers),
    )


def _sources(lines: Iterable[str]) -> list[str]:
    """Of every line, the user's line that it came from, or ""."""
    found, current, depth = [], "", 0
    for line in lines:
        told = COMMENT.match(line) or DOCSTRING.match(line)
        indent = len(line) - len(line.lstrip())
        if told is not None:
            current, depth = told["source"], indent
        elif line.strip() and (indent < depth or line.lstrip().startswith(("def ", "class ", "#"))):
            current = ""
        found.append(current)
    return found

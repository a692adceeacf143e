"""The joint choice of layouts for all nodes over all mesh axes, as an integer program."""

from shardwise.planner.layouts.solve import solve_layouts
from shardwise.planner.layouts.task import LayoutAxis, LayoutSolution, LayoutTask, Prices

__all__ = ["LayoutAxis", "LayoutSolution", "LayoutTask", "Prices", "solve_layouts"]

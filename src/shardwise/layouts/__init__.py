"""Choose layouts for nodes and parameters: a beam for one mesh axis, a joint search for all."""

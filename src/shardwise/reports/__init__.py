"""Reports: what a plan does and why, whether reality followed it, and how two plans differ."""

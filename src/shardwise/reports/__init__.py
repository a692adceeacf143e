"""Reports: explain a plan, compare a recorded run with it, and compare two plans."""

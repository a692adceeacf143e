"""Find the fastest message program of a collective on a network, and prove lower bounds."""

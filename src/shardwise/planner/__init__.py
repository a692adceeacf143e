"""Plans from graphs and clusters."""

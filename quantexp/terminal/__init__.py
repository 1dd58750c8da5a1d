"""What the terminal shows: tables, facts, units, suggestions. Knows nothing of experiments."""
